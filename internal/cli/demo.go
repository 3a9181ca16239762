package cli

import "errors"

type demoCmd struct{}

func (demoCmd) Run(a *app) error { return errors.New("not yet") }
