package toy

import (
	"os"
	"testing"
)

// TestMain fails behind the tests, if it is asked to.
func TestMain(m *testing.M) {
	code := m.Run()
	if os.Getenv("TOY") == "exit" {
		code = 3
	}
	os.Exit(code)
}

func TestToySum(t *testing.T) {
	t.Run("Three", func(t *testing.T) {
		if got := Sum([]int{1, 2, 3}); got != 6 {
			t.Errorf("the sum is %d, not 6", got)
		}
	})
}

func TestToyIdle(t *testing.T) { Idle() }

func TestToySkipped(t *testing.T) { t.Skip("never here") }

func TestToyTurns(t *testing.T) {
	if got := Turns(5); got != 5 {
		t.Errorf("%d turns, not 5", got)
	}
}

func TestToyFails(t *testing.T) {
	if os.Getenv("TOY") == "broken" {
		t.Error("as it was asked to")
	}
}

// TestToyOther is where something else hangs than what has failed.
func TestToyOther(t *testing.T) {
	t.Run("Inside", func(t *testing.T) {
		if os.Getenv("TOY") == "other" {
			t.Error("as it was asked to")
		}
	})
	Turns(1)
}
