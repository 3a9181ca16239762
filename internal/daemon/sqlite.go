package daemon

import (
	"context"
	"errors"
	"log/slog"

	"github.com/outrider-dev/outrider/internal/config"
	"github.com/outrider-dev/outrider/store"
)

func openSQLite(context.Context, config.SQLite, *slog.Logger) (store.Store, error) {
	return nil, errors.New("sqlite is not there yet")
}
