package device

/*
#cgo LDFLAGS: -lonnxruntime
#include <stdlib.h>
#include <onnxruntime_c_api.h>

// Go cannot call pointers to functions, of which the API is a table.
static const OrtApi *api(void) { return OrtGetApiBase()->GetApi(ORT_API_VERSION); }

static const char *message_of(OrtStatus *status) { return api()->GetErrorMessage(status); }
static void release_status(OrtStatus *status) { api()->ReleaseStatus(status); }
static void release_value(OrtValue *value) { api()->ReleaseValue(value); }
static void release_session(OrtSession *session) { api()->ReleaseSession(session); }

// The runtime has one environment, however often it is made. There is no memory pattern, whose one block for a step
// takes up to half more memory, and no less time.
static OrtStatus *open_session(const char *path, int threads, OrtSession **session) {
	static OrtEnv *environment;
	OrtSessionOptions *options = NULL;
	OrtStatus *failed = environment ? NULL : api()->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "onward", &environment);
	if (!failed) failed = api()->CreateSessionOptions(&options);
	if (!failed) failed = api()->SetSessionLogSeverityLevel(options, ORT_LOGGING_LEVEL_ERROR);
	if (!failed) failed = api()->DisableMemPattern(options);
	if (!failed) failed = api()->SetIntraOpNumThreads(options, threads);
	if (!failed) failed = api()->CreateSession(environment, path, options, session);
	if (options) api()->ReleaseSessionOptions(options);
	return failed;
}

static OrtStatus *new_tensor(const int64_t *shape, size_t axes, int type, OrtValue **value, void **data) {
	OrtAllocator *allocator;
	OrtStatus *failed = api()->GetAllocatorWithDefaultOptions(&allocator);
	if (!failed) failed = api()->CreateTensorAsOrtValue(allocator, shape, axes, (ONNXTensorElementDataType)type, value);
	return failed ? failed : api()->GetTensorMutableData(*value, data);
}

static OrtStatus *about_tensor(OrtValue *value, int64_t *shape, size_t *axes, int *type, void **data) {
	OrtTensorTypeAndShapeInfo *about;
	OrtStatus *failed = api()->GetTensorTypeAndShape(value, &about);
	if (failed) return failed;
	ONNXTensorElementDataType element;
	failed = api()->GetTensorElementType(about, &element);
	*type = element;
	size_t most = *axes;
	if (!failed) failed = api()->GetDimensionsCount(about, axes);
	if (!failed && *axes > most) failed = api()->CreateStatus(ORT_INVALID_ARGUMENT, "a tensor has too many axes");
	if (!failed) failed = api()->GetDimensions(about, shape, *axes);
	api()->ReleaseTensorTypeAndShapeInfo(about);
	return failed ? failed : api()->GetTensorMutableData(value, data);
}

static OrtStatus *run(OrtSession *session, char **inputs, OrtValue **given, size_t input_count, char **outputs,
		size_t output_count, OrtValue **found) {
	return api()->Run(session, NULL, (const char *const *)inputs, (const OrtValue *const *)given, input_count,
		(const char *const *)outputs, output_count, found);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

const mostAxes = 32

type ortValue = C.OrtValue

// Types of tensors by numpy's names: the number that ONNX gives them, safetensors' name, and bytes of an element.
type kind struct {
	onnx   C.int
	stored string
	width  int
}

var kinds = map[string]kind{
	"float32": {1, "F32", 4}, "uint8": {2, "U8", 1}, "int8": {3, "I8", 1}, "uint16": {4, "U16", 2}, "int16": {5, "I16", 2},
	"int32": {6, "I32", 4}, "int64": {7, "I64", 8}, "bool": {9, "BOOL", 1}, "float16": {10, "F16", 2},
	"float64": {11, "F64", 8}, "uint32": {12, "U32", 4}, "uint64": {13, "U64", 8},
}

func check(status *C.OrtStatus) error {
	if status == nil {
		return nil
	}
	defer C.release_status(status)
	return errors.New(C.GoString(C.message_of(status)))
}

// A graph that the runtime has opened.
type session struct {
	handle          *C.OrtSession
	inputs, outputs []string
}

func openSession(path string, threads int, inputs, outputs []string) (*session, error) {
	opened := &session{inputs: inputs, outputs: outputs}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	return opened, check(C.open_session(name, C.int(threads), &opened.handle))
}

func (s *session) close() {
	if s.handle != nil {
		C.release_session(s.handle)
	}
}

// Computes the outputs, which are the caller's to release.
func (s *session) run(given []*ortValue) ([]*ortValue, error) {
	names := func(all []string) []*C.char {
		found := make([]*C.char, len(all))
		for i, one := range all {
			found[i] = C.CString(one)
		}
		return found
	}
	inputs, outputs := names(s.inputs), names(s.outputs)
	defer func() {
		for _, one := range append(inputs, outputs...) {
			C.free(unsafe.Pointer(one))
		}
	}()
	found := make([]*ortValue, len(outputs))
	return found, check(C.run(s.handle, first(inputs), first(given), C.size_t(len(inputs)), first(outputs),
		C.size_t(len(outputs)), first(found)))
}

// Where a slice begins, which an empty one does not.
func first[T any](all []T) *T {
	if len(all) == 0 {
		return nil
	}
	return &all[0]
}

// A copy of a tensor in the memory of the runtime, which the caller releases.
func toRuntime(tensor Tensor) (*ortValue, error) {
	var value *ortValue
	var data unsafe.Pointer
	shape := make([]C.int64_t, len(tensor.Shape))
	for i, size := range tensor.Shape {
		shape[i] = C.int64_t(size)
	}
	one, known := kinds[tensor.Dtype]
	if !known {
		return nil, fmt.Errorf("a tensor of the type %s cannot be held here", tensor.Dtype)
	}
	if err := check(C.new_tensor(first(shape), C.size_t(len(shape)), one.onnx, &value, &data)); err != nil {
		return nil, err
	}
	copy(unsafe.Slice((*byte)(data), len(tensor.Data)), tensor.Data)
	return value, nil
}

// A copy of a tensor of the runtime.
func fromRuntime(value *ortValue) (Tensor, error) {
	var shape [mostAxes]C.int64_t
	var axes C.size_t = mostAxes
	var element C.int
	var data unsafe.Pointer
	if err := check(C.about_tensor(value, &shape[0], &axes, &element, &data)); err != nil {
		return Tensor{}, err
	}
	found := Tensor{Shape: make([]int64, axes)}
	for i := range found.Shape {
		found.Shape[i] = int64(shape[i])
	}
	for name, one := range kinds {
		if one.onnx == element {
			found.Dtype = name
			found.Data = append([]byte{}, unsafe.Slice((*byte)(data), found.count()*one.width)...)
			return found, nil
		}
	}
	return Tensor{}, fmt.Errorf("a tensor of ONNX's type %d cannot be held here", element)
}

func release(value *ortValue) {
	if value != nil {
		C.release_value(value)
	}
}

func releaseAll(values map[string]*ortValue) {
	for _, value := range values {
		release(value)
	}
}
