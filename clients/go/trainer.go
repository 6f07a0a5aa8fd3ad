// Package device trains with a bundle that `onward device` wrote, by ONNX Runtime's C API.
package device

import (
	"fmt"
	"path/filepath"
	"strings"
)

// Trainer is a model that is trained on this device, by one goroutine at a time.
type Trainer struct {
	// Of the last update, before clipping; not finite: the update was skipped.
	GradientNorm float32

	folder   string
	manifest *manifest
	sessions map[string]*session
	state    map[string]*ortValue
	inARow   int64
}

// Load opens a bundle with a number of threads; 0: one for each core. Close frees what the runtime holds.
func Load(folder string, threads int) (*Trainer, error) {
	about, err := openManifest(folder)
	if err != nil {
		return nil, err
	}
	t := &Trainer{folder: folder, manifest: about, sessions: map[string]*session{}}
	for name, graph := range about.Graphs {
		path := filepath.Join(folder, graph.File)
		if t.sessions[name], err = openSession(path, threads, namesOf(graph.Inputs), namesOf(graph.Outputs)); err != nil {
			t.Close()
			return nil, err
		}
	}
	state, err := about.firstState(folder)
	if err == nil {
		err = t.setState(state)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// Close frees what the runtime holds.
func (t *Trainer) Close() {
	for _, one := range t.sessions {
		one.close()
	}
	releaseAll(t.state)
	t.sessions, t.state = nil, nil
}

// TrainStep is a forward and backward pass, and the update where the gradients of enough passes are accumulated. It
// gives the loss of the batch. An update whose gradient is not finite changes nothing; after more of them in a row than
// `on_bad_loss.skip` of the run there is an error.
func (t *Trainer) TrainStep(batch Batch) (float32, error) {
	before, scale := t.SkippedUpdates(), t.number("loss_scale")
	name, isOneStep := "train", false
	if _, isOneStep = t.manifest.Graphs["step"]; isOneStep {
		name = "step"
	}
	results, err := t.run(name, batch, t.manifest.Features)
	if err != nil {
		return 0, err
	}
	loss := Values[float32](results["loss"])[0]
	if !isOneStep {
		if int64(t.number("accumulated_passes")) < t.manifest.Training.GradientAccumulationSteps {
			return loss, nil
		}
		if results, err = t.run("update", Batch{}, nil); err != nil {
			return loss, err
		}
	}
	t.GradientNorm = Values[float32](results["gradient_norm"])[0]
	isSkipped, lowersScale := t.SkippedUpdates() > before, t.number("loss_scale") < scale
	if !isSkipped {
		t.inARow = 0
	} else if !lowersScale { // which is how a dynamic scale is found
		t.inARow++
	}
	if t.inARow > t.manifest.Training.SkippedInARow {
		return loss, fmt.Errorf("the last %d weight updates were skipped, since their losses, gradients or batch statistics were not "+
			"finite (gradient norm %g, loss %g); look for infinite or very large values in the batches", t.inARow, t.GradientNorm, loss)
	}
	return loss, nil
}

// Evaluate gives metrics over all samples of some batches, in inference mode.
func (t *Trainer) Evaluate(batches []Batch) (map[string]float64, error) {
	sums, means := map[string]float64{}, map[string]float64{}
	for _, batch := range batches {
		results, err := t.run("eval", batch, t.featuresOf("eval"))
		if err != nil {
			return nil, err
		}
		for name, tensor := range results {
			sums[name] += float64(Values[float32](tensor)[0])
		}
	}
	for _, one := range t.manifest.Metrics {
		if sums[one.Count] != 0 {
			means[one.Name] = sums[one.Sum] / sums[one.Count]
		}
	}
	for _, one := range t.manifest.Metrics {
		for _, part := range one.TotalOf {
			means[one.Name] += means[part]
		}
	}
	return means, nil
}

// Predict gives the outputs of the model with the present weights.
func (t *Trainer) Predict(inputs Batch) (map[string]Tensor, error) {
	return t.run("infer", inputs, t.featuresOf("infer"))
}

// Updates counts the weight updates so far, skipped ones included.
func (t *Trainer) Updates() int64 { return int64(t.number("update_count")) }

// SkippedUpdates counts those whose gradient, loss or statistics were not finite.
func (t *Trainer) SkippedUpdates() int64 { return int64(t.number("skipped_updates")) }

// State is a copy of weights, moments, running statistics, counters and accumulators.
func (t *Trainer) State() (map[string]Tensor, error) {
	found := map[string]Tensor{}
	for name, value := range t.state {
		tensor, err := fromRuntime(value)
		if err != nil {
			return nil, err
		}
		found[name] = tensor
	}
	return found, nil
}

func (t *Trainer) setState(state map[string]Tensor) error {
	next := map[string]*ortValue{}
	for name, tensor := range state {
		value, err := toRuntime(tensor)
		if err != nil {
			releaseAll(next)
			return err
		}
		next[name] = value
	}
	releaseAll(t.state)
	t.state, t.inARow = next, 0
	return nil
}

// A number of the state; 0: there is none of that name.
func (t *Trainer) number(name string) float64 {
	value, found := t.state[name]
	if !found {
		return 0
	}
	tensor, err := fromRuntime(value)
	if err != nil {
		return 0
	}
	if tensor.Dtype == "int64" {
		return float64(Values[int64](tensor)[0])
	}
	return float64(Values[float32](tensor)[0])
}

// Runs a graph on the state, which stays in the memory of the runtime: outputs named `<state>_new` become the state, the
// others are given.
func (t *Trainer) run(name string, batch Batch, expected []described) (map[string]Tensor, error) {
	if err := t.manifest.check(batch, expected); err != nil {
		return nil, err
	}
	opened := t.sessions[name]
	given := make([]*ortValue, len(opened.inputs))
	for i, input := range opened.inputs {
		if value, isState := t.state[input]; isState {
			given[i] = value
			continue
		}
		value, err := toRuntime(batch[input])
		if err != nil {
			return nil, err
		}
		defer release(value)
		given[i] = value
	}
	found, err := opened.run(given)
	if err != nil {
		return nil, err
	}
	results := map[string]Tensor{}
	for i, output := range opened.outputs {
		state := strings.TrimSuffix(output, "_new")
		if old, isState := t.state[state]; isState && state != output {
			release(old)
			t.state[state] = found[i]
			continue
		}
		tensor, err := fromRuntime(found[i])
		if err != nil {
			return nil, err
		}
		release(found[i])
		results[output] = tensor
	}
	return results, nil
}

func (t *Trainer) featuresOf(graph string) []described {
	found := []described{}
	for _, one := range t.manifest.Graphs[graph].Inputs {
		if _, isState := t.state[one.Name]; !isState {
			found = append(found, one)
		}
	}
	return found
}
