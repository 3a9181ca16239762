package layout

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// The two ways to the servers give tests the same variables, and the file for
// Docker says all that `up --wait` and its own heading need.
func TestComposeIsAsTheServersScript(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(root, "scripts", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	text := read("compose.yaml")
	var file struct {
		Name     string `yaml:"name"`
		Services map[string]struct {
			Image     string            `yaml:"image"`
			Build     map[string]string `yaml:"build"`
			Command   any               `yaml:"command"`
			Env       map[string]string `yaml:"environment"`
			DependsOn map[string]struct {
				Condition string `yaml:"condition"`
			} `yaml:"depends_on"`
			Ports  []string `yaml:"ports"`
			Health struct {
				Test     []string `yaml:"test"`
				Interval string   `yaml:"interval"`
				Timeout  string   `yaml:"timeout"`
				Retries  int      `yaml:"retries"`
			} `yaml:"healthcheck"`
		} `yaml:"services"`
	}
	if err := yaml.UnmarshalWithOptions([]byte(text), &file, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	published := map[string]bool{}
	port := regexp.MustCompile(`^127\.0\.0\.1:(\d+):(\d+)$`)
	for name, s := range file.Services {
		tag := regexp.MustCompile(`^[a-z/]+:[a-z0-9.-]+$`)
		if s.Build["dockerfile_inline"] == "" && (!tag.MatchString(s.Image) || strings.HasSuffix(s.Image, ":latest")) {
			t.Errorf("%s: its image is %q, want one with a tag, or a Dockerfile", name, s.Image)
		}
		if len(s.Health.Test) < 2 || !strings.HasPrefix(s.Health.Test[0], "CMD") || s.Health.Interval == "" || s.Health.Retries == 0 {
			t.Errorf("%s: its health check is %+v", name, s.Health)
		}
		for other, d := range s.DependsOn {
			if _, ok := file.Services[other]; !ok || d.Condition != "service_healthy" {
				t.Errorf("%s: depends on %q, %q", name, other, d.Condition)
			}
		}
		for _, p := range s.Ports {
			m := port.FindStringSubmatch(p)
			if m == nil || published[m[1]] {
				t.Errorf("%s: port %q is not on the loopback alone, or is used twice", name, p)
				continue
			}
			published[m[1]] = true
		}
	}
	variable := regexp.MustCompile(`export (OUTRIDER_TEST_\w+)=(\S+)`)
	names := func(text string) []string {
		found := map[string]bool{}
		for _, m := range variable.FindAllStringSubmatch(text, -1) {
			found[m[1]] = true
		}
		return slices.Sorted(maps.Keys(found))
	}
	if got, want := names(text), names(read("servers")); len(want) == 0 || !slices.Equal(got, want) {
		t.Errorf("compose.yaml tells of %v, scripts/servers gives %v", got, want)
	}
	used := map[string]bool{}
	for _, m := range variable.FindAllStringSubmatch(text, -1) {
		if a := regexp.MustCompile(`127\.0\.0\.1:(\d+)`).FindStringSubmatch(m[2]); a != nil && published[a[1]] {
			used[a[1]] = true
			continue
		}
		t.Errorf("%s leads to no port that a service publishes", m[0])
	}
	if !maps.Equal(used, published) {
		t.Errorf("ports %v are published, %v are named in the heading", published, used)
	}
}
