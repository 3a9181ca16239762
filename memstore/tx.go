package memstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/outrider-dev/outrider"
)

// Tx is a transaction of an application. Rows get their ids when they are
// added and are seen when the transaction commits, so ids commit out of order
// as they do in a database. Its methods are called from one goroutine.
type Tx struct {
	store *Store
	rows  []*row
	ended bool
}

// Begin starts a transaction.
func (s *Store) Begin() *Tx { return &Tx{store: s} }

// Add inserts events and returns the rows as they will be handed out.
func (tx *Tx) Add(events ...outrider.Event) ([]outrider.Record, error) {
	if tx.ended {
		return nil, errors.New("memstore: transaction has ended")
	}
	s := tx.store
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.cfg.Now()
	var out []outrider.Record
	for _, e := range events {
		r, err := makeRow(s.lastID+1, e, now)
		if err != nil {
			return nil, err
		}
		s.lastID++
		tx.rows = append(tx.rows, r)
		out = append(out, r.record)
	}
	return out, nil
}

// Commit makes the rows visible, all at once.
func (tx *Tx) Commit() error {
	if tx.ended {
		return errors.New("memstore: transaction has ended")
	}
	tx.ended = true
	s := tx.store
	s.mu.Lock()
	for _, r := range tx.rows {
		i := len(s.rows)
		for i > 0 && s.rows[i-1].id > r.id {
			i--
		}
		s.rows = slices.Insert(s.rows, i, r)
		for _, d := range s.destinations {
			d.add(r)
		}
	}
	watchers := slices.Collect(maps.Keys(s.watchers))
	s.mu.Unlock()
	if len(tx.rows) > 0 {
		for _, w := range watchers {
			w.notify()
		}
	}
	return nil
}

// Rollback ends the transaction; nobody ever sees its rows. After Commit it
// does nothing.
func (tx *Tx) Rollback() { tx.ended, tx.rows = true, nil }

// SetNextID sets the id of the next row, which must be higher than any before.
func (s *Store) SetNextID(id int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastID = id - 1
}

func makeRow(id int64, e outrider.Event, now time.Time) (*row, error) {
	switch {
	case e.AggregateType == "" || e.AggregateID == "" || e.Type == "":
		return nil, errors.New("memstore: aggregate type, aggregate id and type are needed")
	case e.Unordered && e.Key != "":
		return nil, errors.New("memstore: an unordered event has no key")
	case e.Delay != 0 && !e.AvailableAt.IsZero():
		return nil, errors.New("memstore: only one of AvailableAt and Delay may be set")
	}
	r := &row{id: id, record: outrider.Record{Event: e, Row: strconv.FormatInt(id, 10), CreatedAt: now}}
	rec := &r.record
	if rec.ID == "" {
		rec.ID = newID()
	}
	if rec.ContentType == "" {
		rec.ContentType = "application/json"
	}
	rec.Payload = slices.Clone(e.Payload)
	rec.Headers = maps.Clone(e.Headers)
	if h := rec.Headers["traceparent"]; h != "" && rec.Traceparent == "" {
		rec.Traceparent = h
	}
	delete(rec.Headers, "traceparent")
	if e.Delay != 0 {
		rec.AvailableAt, rec.Delay = now.Add(e.Delay), 0
	}
	if e.Unordered {
		rec.Lane = int(id % outrider.Lanes)
	} else {
		if rec.Key == "" {
			rec.Key = rec.AggregateID
		}
		rec.Lane = outrider.Lane(rec.Key)
	}
	return r, nil
}

// newID is a random UUID.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// watcher is one call of Watch.
type watcher struct{ notify func() }

// Watch implements store.Watcher.
func (s *Store) Watch(ctx context.Context, notify func()) error {
	w := &watcher{notify}
	s.mu.Lock()
	s.watchers[w] = struct{}{}
	s.mu.Unlock()
	notify() // of what was committed before it was listening
	<-ctx.Done()
	s.mu.Lock()
	delete(s.watchers, w)
	s.mu.Unlock()
	return ctx.Err()
}
