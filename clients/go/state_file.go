package device

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
)

// How a safetensors file describes a tensor: eight bytes of header length, a JSON header, and the tensors' bytes.
type entry struct {
	Dtype   string   `json:"dtype"`
	Shape   []int64  `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// SaveState writes a state that every client reads, next to its place first.
func (t *Trainer) SaveState(path string) error {
	state, err := t.State()
	if err != nil {
		return err
	}
	names := []string{}
	for name := range state {
		names = append(names, name)
	}
	// Wider types first, so that every tensor begins at a multiple of its element's size.
	sort.Slice(names, func(i, j int) bool {
		a, b := kinds[state[names[i]].Dtype].width, kinds[state[names[j]].Dtype].width
		return a > b || a == b && names[i] < names[j]
	})
	header, data := map[string]any{}, []byte{}
	for _, name := range names {
		one := state[name]
		begin := int64(len(data))
		data = append(data, one.Data...)
		header[name] = entry{kinds[one.Dtype].stored, append([]int64{}, one.Shape...), [2]int64{begin, int64(len(data))}}
	}
	about := map[string]string{"format": "onward-device", "bundle": t.manifest.Identity, "sha256": checksum(data)}
	if t.manifest.RunFields != "" {
		about["run_fields"] = t.manifest.RunFields
	}
	header["__metadata__"] = about
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	content := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), append(text, data...)...)
	unfinished, err := os.CreateTemp(filepath.Dir(path), ".unfinished")
	if err != nil {
		return err
	}
	defer os.Remove(unfinished.Name())
	if _, err := unfinished.Write(content); err != nil {
		return err
	}
	if err := unfinished.Close(); err != nil {
		return err
	}
	return os.Rename(unfinished.Name(), path)
}

// LoadState continues from a state that any client saved.
func (t *Trainer) LoadState(path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	length := uint64(0)
	if len(content) >= 8 {
		length = binary.LittleEndian.Uint64(content)
	}
	entries, about := map[string]json.RawMessage{}, map[string]string{}
	if len(content) < 8 || length > uint64(len(content)-8) || json.Unmarshal(content[8:8+length], &entries) != nil {
		return fmt.Errorf("%s is no safetensors file", path)
	}
	_ = json.Unmarshal(entries["__metadata__"], &about) // what has none is no state
	delete(entries, "__metadata__")
	data := content[8+length:]
	if about["format"] != "onward-device" || about["bundle"] != t.manifest.Identity {
		return fmt.Errorf("%s is no state of this bundle; use the bundle that it was trained with", path)
	}
	if sum := about["sha256"]; sum != "" && sum != checksum(data) {
		return fmt.Errorf("%s was changed or damaged; copy it again", path)
	}
	state, places := map[string]Tensor{}, [][2]int64{}
	for _, expected := range t.manifest.State {
		var one entry
		if json.Unmarshal(entries[expected.Name], &one) != nil || len(entries) != len(t.manifest.State) {
			return fmt.Errorf("%s is no state of this bundle: its tensors have other names", path)
		}
		begin, end := one.Offsets[0], one.Offsets[1]
		tensor := Tensor{Dtype: expected.Dtype, Shape: expected.Shape}
		if one.Dtype != kinds[expected.Dtype].stored || fmt.Sprint(one.Shape) != fmt.Sprint(expected.Shape) || begin < 0 ||
			end > int64(len(data)) || end-begin != int64(tensor.count()*kinds[expected.Dtype].width) {
			return fmt.Errorf("%s is no state of this bundle: %s is %s %v; expected %s %v", path, expected.Name, one.Dtype, one.Shape,
				expected.Dtype, expected.Shape)
		}
		tensor.Data, places = data[begin:end], append(places, one.Offsets)
		state[expected.Name] = tensor
	}
	// Every byte belongs to one tensor: what is shifted in a damaged header would be the values of another.
	sort.Slice(places, func(i, j int) bool {
		return places[i][0] < places[j][0] || places[i][0] == places[j][0] && places[i][1] < places[j][1]
	})
	next := int64(0)
	for _, one := range places {
		if one[0] != next {
			return fmt.Errorf("%s is no safetensors file: a tensor begins at byte %d, where %d comes next", path, one[0], next)
		}
		next = one[1]
	}
	if next != int64(len(data)) {
		return fmt.Errorf("%s is no safetensors file: it holds %d bytes for tensors of %d", path, len(data), next)
	}
	return t.setState(state)
}
