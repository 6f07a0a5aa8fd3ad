// What tests/clients/test_cpp_client.py compares with the Python client: `against_python FOLDER`, which holds a bundle,
// batches as safetensors files and what else the test wrote; `against_python FOLDER losses` trains alone.
#include <onward_device.hpp>

#include <cmath>
#include <functional>
#include <iostream>

namespace fs = std::filesystem;
using onward::Array;
using onward::Batch;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const onward::BundleError& error) {
    return error.what();
  }
  return "not refused";
}

int main(int count, char** arguments) {
  const fs::path folder = arguments[1];
  std::vector<Batch> batches;
  for (int i = 0; fs::exists(folder / ("batch" + std::to_string(i))); ++i)
    batches.push_back(onward::detail::read_safetensors(onward::detail::read_file(folder / ("batch" + std::to_string(i))), "batch").first);
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1);
  auto trainer = onward::Trainer::load(folder / "bundle", std::move(options));
  onward::Json found;
  if (count > 2) {
    for (const auto& batch : batches) found["losses"].push_back(trainer.train_step(batch));
    std::cout << found.dump() << "\n";
    return 0;
  }
  const std::vector<Batch> first(batches.begin(), batches.begin() + 7);
  for (size_t i = 0; i < batches.size(); ++i) {
    if (i == 3) trainer.save_state(folder / "cpp.safetensors");
    found["losses"].push_back(trainer.train_step(batches[i]));
  }
  found["metrics"] = trainer.evaluate(first);
  found["updates"] = trainer.updates();
  found["skipped"] = trainer.skipped_updates();
  found["gradient_norm"] = trainer.gradient_norm.value();
  trainer.export_model(folder / "cpp.onnx");
  for (const auto& [name, array] : trainer.predict(first[0])) found["predictions"][name] = array.values<float>();
  trainer.load_state(folder / "python.safetensors");
  found["continued"] = trainer.train_step(batches[3]);

  // Updates that change nothing: warned of once, an error after two in a row, as the test wrote into this manifest.
  auto skipping = onward::Trainer::load(folder / "impatient");
  skipping.on_warning = [&](const std::string& message) { found["warnings"].push_back(message); };
  auto infinite = batches[0];
  const auto values = static_cast<size_t>(infinite["x"].shape[0] * infinite["x"].shape[1]);
  infinite["x"] = Array::of<float>(infinite["x"].shape, std::vector<float>(values, INFINITY));
  const auto passes = skipping.bundle.manifest["training"]["gradient_accumulation_steps"].get<int>();
  const auto update = [&](const Batch& given) {
    for (int pass = 0; pass < passes; ++pass) skipping.train_step(given);
  };
  for (const auto& given : {infinite, infinite, batches[0], infinite, infinite}) update(given);
  try {
    update(infinite);
  } catch (const onward::SkippedUpdatesError& error) {
    found["skipped_updates_error"] = error.what();
  }

  auto short_labels = batches[0], wide = batches[0], no_x = batches[0], negative = batches[0], halves = batches[0];
  const auto rows = batches[0].at("label").shape[0];
  short_labels["label"] = Array::of<int64_t>({rows - 1}, std::vector<int64_t>(static_cast<size_t>(rows - 1)));
  wide["x"] = Array::of<float>({rows, 7}, std::vector<float>(static_cast<size_t>(rows * 7)));
  no_x.erase("x");
  negative["label"] = Array::of<int64_t>({rows}, std::vector<int64_t>(static_cast<size_t>(rows), -1));
  auto large = negative;
  large["label"] = Array::of<int64_t>({rows}, std::vector<int64_t>(static_cast<size_t>(rows), 1000000));
  auto bytes = batches[0], more = batches[0];
  bytes["x"] = Array::of<uint8_t>({rows, 6}, std::vector<uint8_t>(static_cast<size_t>(rows * 6)));
  more["weight"] = more["label"];
  auto indexed = onward::Trainer::load(folder / "indexed");  // whose labels pick rows of a table
  halves["label"] = Array::of<float>({rows}, std::vector<float>(static_cast<size_t>(rows), 0.5F));
  const std::vector<std::pair<std::string, std::function<void()>>> refused = {
      {"short", [&] { trainer.train_step(short_labels); }},
      {"wide", [&] { trainer.train_step(wide); }},
      {"no_x", [&] { trainer.train_step(no_x); }},
      {"negative", [&] { trainer.train_step(negative); }},
      {"index", [&] { indexed.train_step(negative); }},
      {"large index", [&] { indexed.train_step(large); }},
      {"halves", [&] { trainer.train_step(halves); }},
      {"nothing", [&] { trainer.predict({{"x", Array::of<float>({0, 6}, {})}}); }},
      {"no batches", [&] { trainer.evaluate({}); }},
      {"nowhere", [&] { onward::Trainer::load(folder / "nowhere"); }},
      {"damaged", [&] { onward::Trainer::load(folder / "damaged"); }},
      {"newer", [&] { onward::Trainer::load(folder / "newer"); }},
      {"unknown", [&] { onward::Trainer::load(folder / "unknown"); }},
      {"other_state", [&] { trainer.load_state(folder / "other.safetensors"); }},
      {"no_state", [&] { trainer.load_state(folder / "run.yaml"); }},
      {"shifted", [&] { trainer.load_state(folder / "shifted.safetensors"); }},
      {"flipped", [&] { trainer.load_state(folder / "flipped.safetensors"); }},
      {"no_folder", [&] { trainer.save_state(folder / "nowhere" / "state.safetensors"); }},
      {"bytes", [&] { trainer.train_step(bytes); }},
      {"more", [&] { trainer.train_step(more); }},
      {"no_file", [&] { trainer.load_state(folder / "no.safetensors"); }},
      {"values", [] { Array::of<float>({2, 2}, {1.0F}); }},
  };
  for (const auto& [name, call] : refused) found["refused"][name] = refusal(call);
  std::cout << found.dump() << "\n";
}
