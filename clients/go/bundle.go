package device

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"unsafe"
)

// Tensor is a plain array: a type by numpy's name, the size of every axis, and its elements in the order of rows, in
// little-endian bytes.
type Tensor struct {
	Dtype string
	Shape []int64
	Data  []byte
}

// Batch holds the features and labels of some samples, which are along the first axis.
type Batch map[string]Tensor

// Of makes a tensor of float32, float64, int32 or int64.
func Of[T float32 | float64 | int32 | int64](shape []int64, values []T) Tensor {
	var one T
	name := fmt.Sprintf("%T", one)
	bytes := make([]byte, len(values)*int(unsafe.Sizeof(one)))
	if len(values) > 0 {
		copy(bytes, unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), len(bytes)))
	}
	return Tensor{name, shape, bytes}
}

// Values are the elements of a tensor of that type.
func Values[T float32 | float64 | int32 | int64](tensor Tensor) []T {
	found := make([]T, tensor.count())
	_ = binary.Read(bytes.NewReader(tensor.Data), binary.LittleEndian, found) // fails where there are too few bytes
	return found
}

func (t Tensor) count() int {
	product := 1
	for _, size := range t.Shape {
		product *= int(size)
	}
	return product
}

type described struct {
	Name, Dtype string
	Shape       []any // of numbers, and of names of sizes that are open; nil: any
	// Of features of a training pass: labels are 0 to Classes - 1 and IgnoredLabel, indices 0 to Rows - 1.
	Classes, Rows int64
	IgnoredLabel  *int64 `json:"ignored_label"`
}

type stateTensor struct {
	Name, Dtype string
	Shape       []int64
	Start       struct {
		File           string
		Offset, Length int
		Value          float64
	}
}

// What manifest.json holds; see docs/reference/device-bundle.md.
type manifest struct {
	Format, Identity string
	WrittenBy        string `json:"written_by"`
	Version          int
	Requires         []string
	Graphs           map[string]struct {
		File            string
		Inputs, Outputs []described
	}
	Features []described
	State    []stateTensor
	Metrics  []struct {
		Name, Sum, Count string
		TotalOf          []string `json:"total_of"`
	}
	Training struct {
		GradientAccumulationSteps int64 `json:"gradient_accumulation_steps"`
		SkippedInARow             int64 `json:"skipped_in_a_row"`
	}
	RunFields string `json:"run_fields"`
	Files     map[string]string
}

var known = map[string]bool{"accumulation": true, "class_labels": true, "table_rows": true, "weights_inside": true}

// Reads the manifest of a folder, and compares the checksum of every file.
func openManifest(folder string) (*manifest, error) {
	text, err := os.ReadFile(filepath.Join(folder, "manifest.json"))
	if err != nil {
		return nil, fmt.Errorf("%s is no device bundle: %w", folder, err)
	}
	found := &manifest{}
	if err := json.Unmarshal(text, found); err != nil {
		return nil, fmt.Errorf("manifest.json of %s cannot be read: %w", folder, err)
	}
	if found.Format != "onward-device" || found.Version != 1 {
		return nil, fmt.Errorf("%s is a %q of version %d; this package reads \"onward-device\" of version 1", folder, found.Format,
			found.Version)
	}
	for _, one := range found.Requires {
		if !known[one] {
			return nil, fmt.Errorf("%s requires %s, which this package does not know; take the client of the onward that wrote it (%s)",
				folder, one, found.WrittenBy)
		}
	}
	for name, expected := range found.Files {
		content, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			return nil, err
		}
		if checksum(content) != expected {
			return nil, fmt.Errorf("%s of %s was changed or damaged; copy the bundle again", name, folder)
		}
	}
	return found, nil
}

func checksum(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// The state before the first step.
func (m *manifest) firstState(folder string) (map[string]Tensor, error) {
	read, state := map[string][]byte{}, map[string]Tensor{}
	for _, one := range m.State {
		tensor := Tensor{Dtype: one.Dtype, Shape: one.Shape}
		start := one.Start
		if start.File == "" {
			tensor.Data = filled(one.Dtype, tensor.count(), start.Value)
		} else {
			if read[start.File] == nil {
				content, err := os.ReadFile(filepath.Join(folder, start.File))
				if err != nil {
					return nil, err
				}
				read[start.File] = content
			}
			tensor.Data = read[start.File][start.Offset : start.Offset+start.Length]
		}
		if len(tensor.Data) != tensor.count()*kinds[one.Dtype].width {
			return nil, fmt.Errorf("%s begins with a %s that this package cannot write", one.Name, one.Dtype)
		}
		state[one.Name] = tensor
	}
	return state, nil
}

// Elements that are all one number; nothing for a type that a state does not begin with.
func filled(dtype string, count int, value float64) []byte {
	var one any
	switch dtype {
	default:
		if value == 0 {
			return make([]byte, count*kinds[dtype].width)
		}
		return nil
	case "float32":
		one = float32(value)
	case "int64":
		one = int64(value)
	case "bool":
		one = value != 0
	}
	var element bytes.Buffer
	_ = binary.Write(&element, binary.LittleEndian, one) // a buffer does not fail
	return bytes.Repeat(element.Bytes(), count)
}

func namesOf(all []described) []string {
	found := make([]string, len(all))
	for i, one := range all {
		found[i] = one.Name
	}
	return found
}

func sorted(names []string) []string {
	sort.Strings(names)
	return names
}

// Compares a batch with what a graph reads.
func (m *manifest) check(batch Batch, expected []described) error {
	sizes := map[string]int64{}
	for _, one := range expected {
		tensor, found := batch[one.Name]
		if !found {
			return fmt.Errorf("the batch has no %q; expected %s", one.Name, strings.Join(sorted(namesOf(expected)), ", "))
		}
		if tensor.Dtype != one.Dtype {
			return fmt.Errorf("%q is %s; expected %s", one.Name, tensor.Dtype, one.Dtype)
		}
		if bytes := tensor.count() * kinds[one.Dtype].width; len(tensor.Data) != bytes || bytes == 0 {
			return fmt.Errorf("%q has %d bytes and the shape %v; expected %d, and no batches without samples", one.Name,
				len(tensor.Data), tensor.Shape, bytes)
		}
		fits := one.Shape == nil || len(one.Shape) == len(tensor.Shape)
		for axis := 0; fits && axis < len(one.Shape); axis++ {
			size := tensor.Shape[axis]
			switch wanted := one.Shape[axis].(type) {
			case float64:
				fits = int64(wanted) == size
			case string: // equal names are equal sizes
				if wanted == "?" {
					continue
				}
				if _, met := sizes[wanted]; !met {
					sizes[wanted] = size
				}
				fits = sizes[wanted] == size
			}
		}
		if !fits {
			return fmt.Errorf("%q has the shape %v; expected %v with %v", one.Name, tensor.Shape, one.Shape, sizes)
		}
		if err := m.checkNumbers(one.Name, tensor); err != nil {
			return err
		}
	}
	return nil
}

// A runtime counts negative labels and indices from the end, and fails for others.
func (m *manifest) checkNumbers(name string, tensor Tensor) error {
	for _, one := range m.Features {
		if one.Name != name || one.Classes+one.Rows == 0 {
			continue
		}
		for _, number := range integers(tensor) {
			if one.Rows > 0 && (number < 0 || number >= one.Rows) {
				return fmt.Errorf("%q holds the index %d; expected 0 to %d, since it picks rows of a table that has %d", name, number,
					one.Rows-1, one.Rows)
			}
			isIgnored := one.IgnoredLabel != nil && number == *one.IgnoredLabel
			if one.Classes > 0 && !isIgnored && (number < 0 || number >= one.Classes) {
				return fmt.Errorf("%q holds the label %d; expected 0 to %d", name, number, one.Classes-1)
			}
		}
	}
	return nil
}

func integers(tensor Tensor) []int64 {
	width, found := kinds[tensor.Dtype].width, make([]int64, tensor.count())
	for i := range found {
		var element [8]byte
		copy(element[:], tensor.Data[i*width:(i+1)*width])
		bits, unused := binary.LittleEndian.Uint64(element[:]), 64-8*width
		switch tensor.Dtype {
		case "float32": // fractions are cut off before a lookup
			found[i] = int64(math.Float32frombits(uint32(bits)))
		case "float64":
			found[i] = int64(math.Float64frombits(bits))
		case "int8", "int16", "int32":
			found[i] = int64(bits<<unused) >> unused
		default:
			found[i] = int64(bits)
		}
	}
	return found
}
