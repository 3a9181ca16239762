package sqlitestore

import "github.com/outrider-dev/outrider/store"

// Kill ends a session without Leave, as the death of its process does.
func Kill(s store.Session) {
	switch ses := s.(type) {
	case *session:
		ses.kill()
	case *rowSession:
		ses.kill()
	}
}

// LoseAnswer lets the next write of a session take effect and return an error.
func LoseAnswer(s store.Session) {
	switch ses := s.(type) {
	case *session:
		ses.loseAnswer.Store(true)
	case *rowSession:
		ses.loseAnswer.Store(true)
	}
}
