// What tests/clients/test_go_client.py compares with the Python client: `against_python FOLDER`, which holds a bundle,
// batches and what else the test wrote.
package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"

	"onward.example/device"
)

type batchFile map[string]struct {
	Dtype  string
	Shape  []int64
	Values []float64
}

func (b batchFile) batch() device.Batch {
	found := device.Batch{}
	for name, one := range b {
		if one.Dtype == "int64" {
			values := []int64{}
			for _, value := range one.Values {
				values = append(values, int64(value))
			}
			found[name] = device.Of(one.Shape, values)
			continue
		}
		values := []float32{}
		for _, value := range one.Values {
			values = append(values, float32(value))
		}
		found[name] = device.Of(one.Shape, values)
	}
	return found
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

// An error's text.
func refusal[T any](_ T, err error) string {
	if err == nil {
		return "not refused"
	}
	return err.Error()
}

func with(batch device.Batch, name string, tensor device.Tensor) device.Batch {
	found := device.Batch{name: tensor}
	for other, one := range batch {
		if other != name {
			found[other] = one
		}
	}
	return found
}

func main() {
	folder := os.Args[1]
	in := func(name string) string { return filepath.Join(folder, name) }
	var files []batchFile
	if err := json.Unmarshal(must(os.ReadFile(in("batches.json"))), &files); err != nil {
		panic(err)
	}
	batches := []device.Batch{}
	for _, one := range files {
		batches = append(batches, one.batch())
	}
	trainer := must(device.Load(in("bundle"), 1))
	defer trainer.Close()
	found := map[string]any{}
	losses := []float32{}
	for i, batch := range batches {
		if i == 3 {
			must(0, trainer.SaveState(in("go.safetensors")))
		}
		losses = append(losses, must(trainer.TrainStep(batch)))
	}
	found["losses"], found["updates"], found["skipped"] = losses, trainer.Updates(), trainer.SkippedUpdates()
	found["gradient_norm"] = trainer.GradientNorm
	found["metrics"] = must(trainer.Evaluate(batches[:7]))
	for _, tensor := range must(trainer.Predict(device.Batch{"x": batches[0]["x"]})) {
		found["predictions"] = device.Values[float32](tensor)
	}
	must(0, trainer.LoadState(in("python.safetensors")))
	found["continued"] = must(trainer.TrainStep(batches[3]))

	rows := batches[0]["x"].Shape[0]
	numbers := func(value int64) []int64 {
		found := make([]int64, rows)
		for i := range found {
			found[i] = value
		}
		return found
	}
	labels := func(value int64) device.Batch {
		return with(batches[0], "label", device.Of([]int64{rows}, numbers(value)))
	}
	indexed := must(device.Load(in("indexed"), 1))
	refused := map[string]string{
		"short":    refusal(trainer.TrainStep(with(batches[0], "label", device.Of([]int64{rows - 1}, numbers(0)[1:])))),
		"wide":     refusal(trainer.TrainStep(with(batches[0], "x", device.Of([]int64{rows, 7}, make([]float32, rows*7))))),
		"bytes":    refusal(trainer.TrainStep(with(batches[0], "x", device.Of([]int64{rows, 6}, make([]float32, 5))))),
		"no_x":     refusal(trainer.TrainStep(device.Batch{"label": batches[0]["label"]})),
		"type":     refusal(trainer.TrainStep(with(batches[0], "x", device.Of([]int64{rows, 6}, make([]float64, rows*6))))),
		"negative": refusal(trainer.TrainStep(labels(-1))),
		"large":    refusal(trainer.TrainStep(labels(1000000))),
		"index":    refusal(indexed.TrainStep(labels(-1))),
		"damaged":  refusal(device.Load(in("damaged"), 1)),
		"newer":    refusal(device.Load(in("newer"), 1)),
		"unknown":  refusal(device.Load(in("unknown"), 1)),
		"nowhere":  refusal(device.Load(in("nowhere"), 1)),
		"other":    refusal(0, trainer.LoadState(in("other.safetensors"))),
		"no_state": refusal(0, trainer.LoadState(in("run.yaml"))),
		"shifted":  refusal(0, trainer.LoadState(in("shifted.safetensors"))),
		"flipped":  refusal(0, trainer.LoadState(in("flipped.safetensors"))),
	}
	impatient := must(device.Load(in("impatient"), 1)) // two skipped updates in a row are allowed
	endless := make([]float32, rows*6)
	for i := range endless {
		endless[i] = float32(math.Inf(1))
	}
	infinite := with(batches[0], "x", device.Of([]int64{rows, 6}, endless))
	steps := 0
	for refused["skipped"] == "" && steps < 100 {
		steps++
		if _, err := impatient.TrainStep(infinite); err != nil {
			refused["skipped"] = err.Error()
		}
	}
	found["refused"], found["skipping_steps"] = refused, steps
	must(0, json.NewEncoder(os.Stdout).Encode(found))
}
