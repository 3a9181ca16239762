package config

import (
	"fmt"
	"strings"
)

// interpolate replaces ${NAME} and ${NAME:-default}; $${ stands for ${. It works
// on values after the file has been read, so that what is in the environment
// can never change the file's structure.
func interpolate(s string, lookup func(string) (string, bool)) (string, error) {
	var b strings.Builder
	for {
		i := strings.Index(s, "${")
		if i < 0 {
			b.WriteString(s)
			return b.String(), nil
		}
		if i > 0 && s[i-1] == '$' {
			b.WriteString(s[:i-1] + "${")
			s = s[i+2:]
			continue
		}
		end := strings.IndexByte(s[i:], '}')
		if end < 0 {
			return "", fmt.Errorf("${ is not closed; a literal one is $${")
		}
		b.WriteString(s[:i])
		value, err := variable(s[i+2:i+end], lookup)
		if err != nil {
			return "", err
		}
		b.WriteString(value)
		s = s[i+end+1:]
	}
}

func variable(s string, lookup func(string) (string, bool)) (string, error) {
	name, fallback, hasFallback := strings.Cut(s, ":-")
	if !isName(name) {
		return "", fmt.Errorf("${%s} does not name an environment variable; a literal one is $${", s)
	}
	value, ok := lookup(name)
	switch {
	case hasFallback && value == "":
		return fallback, nil
	case !ok:
		return "", fmt.Errorf("the environment variable %s is not set; set it, or write ${%s:-default}", name, name)
	}
	return value, nil
}

func isName(s string) bool {
	for i, c := range []byte(s) {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}
