package migrate

import (
	"errors"
	"strings"

	"github.com/outrider-dev/outrider"
)

// explain adds the advice for rights that are missing to an error of PostgreSQL.
func (m *migrator) explain(err error) error {
	if m.Dialect != outrider.Postgres || outrider.Hint(err) != "" {
		return err
	}
	return explainRights(err)
}

// explainRights goes by the code, which every driver gives by SQLState. What is
// missing stands in the text, which is in the server's language: then the advice
// is the one for all cases.
func explainRights(err error) error {
	var coded interface{ SQLState() string }
	if !errors.As(err, &coded) {
		return err
	}
	const owner = "the tables belong to the role that made them, and only it, or a member of it, changes them"
	switch text := err.Error(); {
	case coded.SQLState() == "3F000": // invalid_schema_name
		return outrider.WithHint(err, "the search_path names no schema that the role may use: "+createGrant("public"))
	case coded.SQLState() != "42501": // insufficient_privilege
		return err
	case strings.Contains(text, "permission denied for schema "):
		_, name, _ := strings.Cut(text, "permission denied for schema ")
		name, _, _ = strings.Cut(name, " ")
		return outrider.WithHint(err, createGrant(name))
	case strings.Contains(text, "permission denied for table outbox_migrations"):
		return outrider.WithHint(err, "to look: grant select on outbox_migrations to ROLE; to migrate: "+owner)
	default:
		return outrider.WithHint(err, owner+"; to make them a role needs this: "+createGrant("public"))
	}
}

func createGrant(schema string) string {
	return "grant usage, create on schema " + schema + " to ROLE, where ROLE is the one that migrates; " +
		`docs/OPERATING.md has the rights of each role under "Rights on PostgreSQL"`
}
