package daemon

import (
	"context"
	"errors"
	"fmt"
)

// cleanups undo what was set up, last first, whatever fails.
type cleanups struct{ list []cleanup }

type cleanup struct {
	name string
	do   func(context.Context) error
}

func (c *cleanups) add(name string, do func(context.Context) error) {
	c.list = append(c.list, cleanup{name, do})
}

func (c *cleanups) run(ctx context.Context) error {
	var errs []error
	for len(c.list) > 0 {
		last := c.list[len(c.list)-1]
		c.list = c.list[:len(c.list)-1]
		if err := last.do(ctx); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", last.name, err))
		}
	}
	return errors.Join(errs...)
}
