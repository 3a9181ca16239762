// Command outrider relays transactional outboxes and looks into them.
package main

import (
	"context"
	"os"

	"github.com/outrider-dev/outrider/internal/cli"
)

func main() {
	os.Exit(cli.Run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
