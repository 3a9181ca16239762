package cli

import (
	"context"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// asProgram makes the test binary the program itself, for tests of processes.
const asProgram = "OUTRIDER_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	goleak.VerifyTestMain(m)
}
