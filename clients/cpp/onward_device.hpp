// Trains device bundles of onward with ONNX Runtime, from C++17 on: one header, beside ONNX Runtime's own and
// nlohmann/json. docs/reference/device-bundle.md of onward describes the bundle.
//
//     auto trainer = onward::Trainer::load("bundle");
//     float loss = trainer.train_step({{"x", onward::Array::of<float>({32, 6}, values)}, {"label", ...}});
//     trainer.save_state("state.safetensors");  // load_state continues exactly there
//     trainer.export_model("trained.onnx");     // one file for any ONNX runtime
//
// Every error that a caller can cause is an onward::BundleError, updates that change nothing an onward::SkippedUpdatesError;
// what the runtime throws is an Ort::Exception.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace onward {

// A bundle, a state or a batch that does not fit, with what was expected and what to do.
struct BundleError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Too many weight updates in a row were skipped; weights and moments are as before them.
struct SkippedUpdatesError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Json = nlohmann::ordered_json;
using Shape = std::vector<int64_t>;

namespace detail {

struct Kind {
  const char *name, *stored;  // numpy's, safetensors'
  ONNXTensorElementDataType onnx;
  size_t bytes;
};

// The types of a manifest, in the order in which safetensors sorts them: the widest first.
inline const Kind& kind_of(const std::string& name, bool is_stored = false) {
  static const Kind kinds[] = {
      {"uint64", "U64", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8},  {"int64", "I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
      {"float64", "F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8}, {"float32", "F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
      {"uint32", "U32", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4},  {"int32", "I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
      {"float16", "F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2}, {"uint16", "U16", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2},
      {"int16", "I16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2},    {"int8", "I8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},
      {"uint8", "U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},     {"bool", "BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1}};
  for (const auto& kind : kinds)
    if (name == (is_stored ? kind.stored : kind.name)) return kind;
  throw BundleError("the type " + name + " cannot be held here; expected float32, int64 or another type of numbers.");
}

inline std::string text_of(const Shape& shape) {
  std::string text;
  for (auto size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

inline std::string short_name(const std::string& identity) {
  return identity.empty() ? "without a name" : identity.substr(0, 12);
}

inline std::string read_file(const std::filesystem::path& path, uint64_t offset = 0, int64_t length = -1) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw BundleError(path.parent_path().string() + " has no file " + path.filename().string() +
                      ". Copy the bundle again, all files of it.");
  if (length < 0) {
    file.seekg(0, std::ios::end);
    length = static_cast<int64_t>(file.tellg()) - static_cast<int64_t>(offset);
  }
  std::string content(static_cast<size_t>(std::max<int64_t>(length, 0)), '\0');
  file.seekg(static_cast<std::streamoff>(offset));
  if (!file.read(content.data(), static_cast<std::streamsize>(content.size())))
    throw BundleError(path.string() + " ends before byte " + std::to_string(offset + content.size()) + ". Copy it again.");
  return content;
}

// Writes a file next to its place first, so that it is complete or absent.
inline void replace_file(const std::filesystem::path& path, const std::string& content) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  if (!std::filesystem::is_directory(folder))
    throw BundleError(path.string() + " cannot be written: there is no folder " + folder.string() + ". Make it, or choose another.");
  auto unfinished = path;
  unfinished += ".unfinished";
  {
    std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    if (!file.flush()) throw BundleError(path.string() + " cannot be written. Choose another folder, or make room.");
  }
  std::filesystem::rename(unfinished, path);
}

// SHA-256 in hexadecimal digits (FIPS 180-4).
inline std::string sha256(std::string content) {
  static constexpr uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::array<uint32_t, 8> hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto turn = [](uint32_t x, int bits) { return x >> bits | x << (32 - bits); };
  const uint64_t bits = uint64_t{8} * content.size();
  content += '\x80';
  content.resize((content.size() + 8 + 63) / 64 * 64, '\0');
  for (size_t i = 0; i < 8; ++i) content[content.size() - 1 - i] = static_cast<char>(bits >> (8 * i));
  for (size_t block = 0; block < content.size(); block += 64) {
    uint32_t w[64];
    for (size_t i = 0; i < 64; ++i) {
      if (i < 16) {
        w[i] = 0;
        for (size_t j = 0; j < 4; ++j) w[i] = w[i] << 8 | static_cast<uint8_t>(content[block + 4 * i + j]);
        continue;
      }
      const auto s0 = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3;
      const auto s1 = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = hash;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
      const uint32_t t2 = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t found[8] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) hash[i] += found[i];
  }
  char digits[65];
  for (size_t i = 0; i < 8; ++i) std::snprintf(digits + 8 * i, 9, "%08x", static_cast<unsigned>(hash[i]));
  return digits;
}

}  // namespace detail

// Values in the order of rows, little-endian, and the size of every axis. float16 are their bits, booleans bytes.
struct Array {
  std::string dtype;  // numpy's name
  Shape shape;
  std::string bytes;

  template <typename T>
  static Array of(Shape shape, const std::vector<T>& values) {
    Array found{dtype_of<T>(), std::move(shape), std::string(sizeof(T) * values.size(), '\0')};
    if (found.count() != static_cast<int64_t>(values.size()))
      throw BundleError(std::to_string(values.size()) + " values are no array of the shape " + detail::text_of(found.shape) + ".");
    std::memcpy(found.bytes.data(), values.data(), found.bytes.size());
    return found;
  }

  template <typename T>
  std::vector<T> values() const {
    if (dtype != dtype_of<T>()) throw BundleError("the array is " + dtype + ", and was asked for " + dtype_of<T>() + ".");
    std::vector<T> found(bytes.size() / sizeof(T));
    std::memcpy(found.data(), bytes.data(), bytes.size());
    return found;
  }

  int64_t count() const {
    int64_t product = 1;
    for (auto size : shape) product *= size;
    return product;
  }

  template <typename T>
  static std::string dtype_of() {
    if (std::is_same_v<T, bool>) return "bool";
    return (std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint") + std::to_string(8 * sizeof(T));
  }
};

using Arrays = std::map<std::string, Array>;
using Batch = Arrays;  // feature or label -> array, the samples along the first axis

namespace detail {

// A safetensors file, in the order of tensors that its own library writes.
inline std::string write_safetensors(const Arrays& tensors, const Json& metadata) {
  std::vector<const Arrays::value_type*> sorted;
  for (const auto& one : tensors) sorted.push_back(&one);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](auto a, auto b) { return &kind_of(a->second.dtype) < &kind_of(b->second.dtype); });
  Json header = {{"__metadata__", metadata}};
  size_t end = 0;
  std::string content;
  for (const auto* one : sorted) {
    const auto& [name, array] = *one;
    header[name] = {{"dtype", kind_of(array.dtype).stored}, {"shape", array.shape}, {"data_offsets", {end, end + array.bytes.size()}}};
    end += array.bytes.size();
    content += array.bytes;
  }
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(uint64_t{text.size()} >> (8 * i));
  return length + text + content;
}

inline std::pair<Arrays, Json> read_safetensors(const std::string& file, const std::string& source) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8 && file.size() >= 8; ++i) length |= uint64_t{static_cast<uint8_t>(file[i])} << (8 * i);
  if (file.size() < 8 || length > file.size() - 8)
    throw BundleError(source + " is no safetensors file: its header would take " + std::to_string(length) + " bytes.");
  const auto header = Json::parse(file.begin() + 8, file.begin() + 8 + static_cast<std::ptrdiff_t>(length), nullptr, false);
  if (!header.is_object()) throw BundleError(source + " is no safetensors file: its header is no JSON object.");
  Arrays tensors;
  std::multiset<std::pair<uint64_t, uint64_t>> places;
  const auto start = 8 + length;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    try {
      const auto& kind = kind_of(entry.at("dtype").get<std::string>(), true);
      const auto begin = entry.at("data_offsets").at(0).get<uint64_t>(), end = entry.at("data_offsets").at(1).get<uint64_t>();
      Array array{kind.name, entry.at("shape").get<Shape>(), {}};
      if (begin > end || end > file.size() - start || end - begin != kind.bytes * static_cast<uint64_t>(array.count()))
        throw BundleError("its bytes do not fit its shape");
      array.bytes = file.substr(start + begin, end - begin);
      places.emplace(begin, end);
      tensors.emplace(name, std::move(array));
    } catch (const std::exception& error) {
      throw BundleError(source + " is no safetensors file: the entry of \"" + name + "\" is damaged: " + error.what() + ".");
    }
  }
  // Every byte belongs to one tensor: what is shifted in a damaged header would be the values of another.
  uint64_t next = 0;
  for (const auto& [begin, end] : places) {
    if (begin != next)
      throw BundleError(source + " is no safetensors file: a tensor begins at byte " + std::to_string(begin) + ", where " + std::to_string(next) + " comes next.");
    next = end;
  }
  if (next != file.size() - start)
    throw BundleError(source + " is no safetensors file: it holds " + std::to_string(file.size() - start) + " bytes for tensors of " + std::to_string(next) + ".");
  return {std::move(tensors), header.value("__metadata__", Json::object())};
}

// SHA-256 of all tensors of a safetensors file: the bytes behind its header.
inline std::string checksum(const std::string& file) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= uint64_t{static_cast<uint8_t>(file.at(i))} << (8 * i);
  return sha256(file.substr(8 + length));
}

// Protobuf's wire format, and the numbers of onnx.proto: a model with values put into it.
struct Field {
  uint64_t number;
  std::string content, all;  // content of numbers is empty
};

inline uint64_t read_varint(const std::string& message, size_t& place) {
  uint64_t found = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = static_cast<uint8_t>(message.at(place++));
    found |= uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) break;
  }
  return found;
}

inline std::string varint(uint64_t number) {
  std::string parts;
  for (; number > 0x7F; number >>= 7) parts += static_cast<char>((number & 0x7F) | 0x80);
  return parts + static_cast<char>(number);
}

inline std::string message(uint64_t number, const std::string& content) {
  return varint(number << 3 | 2) + varint(content.size()) + content;
}

inline std::vector<Field> fields(const std::string& message) {
  std::vector<Field> found;
  for (size_t place = 0; place < message.size();) {
    const auto start = place;
    const auto tag = read_varint(message, place);
    Field field{tag >> 3, {}, {}};
    if ((tag & 7) == 0) {
      read_varint(message, place);
    } else if ((tag & 7) == 2) {
      const auto length = read_varint(message, place);
      field.content = message.substr(place, length);
      place += length;
    } else {
      place += (tag & 7) == 1 ? 8 : 4;
    }
    field.all = message.substr(start, place - start);
    found.push_back(std::move(field));
  }
  return found;
}

inline std::string text_in(const std::string& message, uint64_t wanted) {
  for (const auto& field : fields(message))
    if (field.number == wanted) return field.content;
  return {};
}

// An initializer whose bytes are in the message itself.
inline std::string inside(const std::string& tensor, const std::filesystem::path& folder) {
  std::map<std::string, std::string> about;
  std::string kept;
  for (const auto& field : fields(tensor)) {
    if (field.number == 13) about[text_in(field.content, 1)] = text_in(field.content, 2);
    if (field.number != 13 && field.number != 14) kept += field.all;
  }
  if (about.empty()) return tensor;
  const auto path = folder / std::filesystem::path(about["location"]).filename();
  const auto offset = about.count("offset") ? std::stoull(about["offset"]) : 0;
  return kept + message(9, read_file(path, offset, about.count("length") ? std::stoll(about["length"]) : -1));
}

inline std::string with_values(const std::string& model, const Arrays& values, const std::filesystem::path& folder) {
  constexpr uint64_t graph = 7, initializer = 5, input = 11;
  std::string content;
  for (const auto& part : fields(model)) {
    if (part.number != graph) {
      content += part.all;
      continue;
    }
    std::string changed;
    for (const auto& field : fields(part.content)) {
      if (field.number == initializer) changed += message(initializer, inside(field.content, folder));
      else if (field.number != input || !values.count(text_in(field.content, 1))) changed += field.all;
    }
    for (const auto& [name, array] : values) {
      std::string tensor;
      for (auto size : array.shape) tensor += varint(1 << 3) + varint(static_cast<uint64_t>(size));
      tensor += varint(2 << 3) + varint(static_cast<uint64_t>(kind_of(array.dtype).onnx));
      changed += message(initializer, tensor + message(8, name) + message(9, array.bytes));
    }
    content += message(graph, changed);
  }
  if (content.size() > 0x7FFFFFFF)
    throw BundleError("the model takes " + std::to_string(content.size()) +
                      " bytes, and an ONNX file ends at 2 GiB. Save the state, and run `onward export MODEL --device-state`.");
  return content;
}

}  // namespace detail

// A folder that `onward device` wrote.
class Bundle {
 public:
  // Throws BundleError: it is no bundle of this version, or (verify) a file was changed.
  explicit Bundle(std::filesystem::path where, bool verify = true) : folder(std::move(where)) {
    const auto path = folder / "manifest.json";
    if (!std::filesystem::exists(path))
      throw BundleError(folder.string() + " is no device bundle: it has no manifest.json. Write one with `onward device RUN.yaml -o DIR`.");
    manifest = Json::parse(detail::read_file(path), nullptr, false);
    if (manifest.is_discarded()) throw BundleError(path.string() + " is no JSON. Write the bundle again.");
    if (!manifest.is_object() || manifest.value("format", "") != "onward-device")
      throw BundleError(path.string() + " is no manifest of a device bundle; expected the format \"onward-device\".");
    if (manifest.value("version", 0) != 1)
      throw BundleError(folder.string() + " is a device bundle of version " + manifest["version"].dump() +
                        "; this header reads version 1. Take the header of the onward that wrote it (" + manifest.value("written_by", "") + ").");
    static const std::set<std::string> all = {"accumulation", "class_labels", "table_rows", "weights_inside"};
    std::set<std::string> unknown;
    for (const std::string one : manifest.value("requires", Json::array()))
      if (!all.count(one)) unknown.insert(one);
    if (!unknown.empty()) {
      std::string listed;
      for (const auto& one : unknown) listed += (listed.empty() ? "" : ", ") + one;
      throw BundleError(folder.string() + " is a device bundle that requires " + listed +
                        ", which this header does not know. Take the header of the onward that wrote it (" + manifest.value("written_by", "") + ").");
    }
    for (const auto& [name, expected] : manifest["files"].items()) {
      const auto found = verify ? detail::sha256(detail::read_file(folder / name)) : expected.get<std::string>();
      if (found != expected)
        throw BundleError((folder / name).string() + " was changed or damaged: its SHA-256 is " + found + ", the manifest has " +
                          expected.get<std::string>() + ". Copy the bundle again.");
    }
  }

  Arrays first_state() const {
    Arrays found;
    for (const auto& one : manifest["state"]) {
      Array array{one["dtype"], one["shape"].get<Shape>(), {}};
      const auto& start = one["start"];
      if (start.contains("file")) {
        array.bytes = detail::read_file(folder / start["file"].get<std::string>(), start["offset"], start["length"]);
      } else {
        const auto width = detail::kind_of(array.dtype).bytes;
        array.bytes.resize(width * static_cast<size_t>(array.count()), '\0');
        if (start["value"] != 0) fill(array, start["value"], width);
      }
      found.emplace(one["name"], std::move(array));
    }
    return found;
  }

  // Throws BundleError: a tensor is missing, unknown, or of another shape or type.
  void check_state(const Arrays& state, const std::string& source) const {
    std::set<std::string> known;
    for (const auto& one : manifest["state"]) {
      const auto name = one["name"].get<std::string>();
      known.insert(name);
      const auto found = state.find(name);
      if (found == state.end()) throw not_of_this(source, name + " is not in it");
      const auto dtype = one["dtype"].get<std::string>();
      const auto shape = one["shape"].get<Shape>();
      const auto& array = found->second;
      if (array.dtype != dtype || array.shape != shape)
        throw not_of_this(source, "\"" + name + "\" is " + array.dtype + " " + detail::text_of(array.shape) + "; expected " + dtype + " " + detail::text_of(shape));
    }
    for (const auto& [name, array] : state)
      if (!known.count(name)) throw not_of_this(source, name + " is not in the bundle");
  }

  std::string identity() const { return manifest["identity"]; }

  std::filesystem::path folder;
  Json manifest;

 private:
  static BundleError not_of_this(const std::string& source, const std::string& why) {
    return BundleError(source + " is no state of this bundle: " + why + ". Use the bundle that the state was trained with.");
  }

  static void fill(Array& array, const Json& value, size_t width) {
    std::string one(width, '\0');
    if (array.dtype == "float32") {
      const auto number = value.get<float>();
      std::memcpy(one.data(), &number, width);
    } else if (array.dtype == "float64") {
      const auto number = value.get<double>();
      std::memcpy(one.data(), &number, width);
    } else if (array.dtype == "float16") {
      throw BundleError("the state begins with " + value.dump() + " in float16, which this header cannot write.");
    } else {
      const auto number = value.is_boolean() ? int64_t{value.get<bool>()} : value.get<int64_t>();
      std::memcpy(one.data(), &number, width);  // little-endian: the low bytes come first
    }
    for (size_t place = 0; place < array.bytes.size(); place += width) array.bytes.replace(place, width, one);
  }
};

// Watches the updates of a trainer, by the rule of `onward train`.
class SkippedUpdates {
 public:
  struct Update {
    int64_t number;     // from 1
    bool is_skipped;
    bool lowers_scale;  // the dynamic loss scale, which is found that way: such an update does not count
    float norm, loss;
  };

  // `training` is that section of the manifest.
  explicit SkippedUpdates(const Json& training)
      : most_(training.value("skipped_in_a_row", int64_t{10})), fixed_scale_(training.value("fixed_loss_scale", Json())) {}

  // The message about the first skipped update, or nothing. Throws SkippedUpdatesError: more in a row were skipped than
  // are allowed.
  std::string after_update(const Update& update) {
    if (!update.is_skipped) in_a_row_ = 0;
    if (!update.is_skipped || update.lowers_scale) return "";
    ++in_a_row_;
    std::ostringstream found;
    found << "gradient norm " << update.norm << ", loss " << update.loss;
    const auto number = std::to_string(update.number), most = std::to_string(most_);
    if (in_a_row_ > most_)
      throw SkippedUpdatesError("the last " + std::to_string(in_a_row_) + " weight updates were skipped, since their losses, gradients or "
                                "batch statistics were not finite (update " + number + ": " + found.str() + "): nothing was trained by them. "
                                "on_bad_loss.skip of the bundle's run allows " + most + " in a row. " + what_to_do());
    if (has_warned_) return "";
    has_warned_ = true;
    return "update " + number + " was skipped: its loss, gradient or batch statistics are not finite (" + found.str() +
           "). Later ones are counted in Trainer::skipped_updates; more than " + most + " in a row throw an error.";
  }

 private:
  std::string what_to_do() const {
    if (!fixed_scale_.is_null())
      return "mixed_precision.loss_scale of the bundle's run is " + fixed_scale_.dump() + ", at which gradients overflow. Write the bundle "
             "again with 0 for dynamic loss scaling, or with a smaller value.";
    return "Look for infinite, NaN or very large values in the batches, or write the bundle again with a lower learning_rate.initial_lr or "
           "with optimizer.max_norm_clip.";
  }

  int64_t most_, in_a_row_ = 0;
  Json fixed_scale_;
  bool has_warned_ = false;
};

// Messages are errors alone: the runtime warns of each value that a skipped update reads and its optimizer would rename,
// and of first values inside a graph, which no node reads. There is no memory pattern, whose one block for a step takes
// up to half more memory, and no less time.
inline Ort::SessionOptions session_options() {
  Ort::SessionOptions options;
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
  options.DisableMemPattern();
  return options;
}

// A model that is trained on this device. Not for several threads at once.
class Trainer {
 public:
  // `options` has the execution providers and the number of threads.
  static Trainer load(const std::filesystem::path& folder, Ort::SessionOptions options = session_options(), bool verify = true) {
    return Trainer(Bundle(folder, verify), std::move(options));
  }

  explicit Trainer(Bundle given, Ort::SessionOptions options = session_options())
      : bundle(std::move(given)), environment_(ORT_LOGGING_LEVEL_WARNING, "onward"), options_(std::move(options)) {
    set_state(bundle.first_state());
  }

  // Of the last update, before clipping; not finite: the update was skipped. Empty: there was none.
  std::optional<float> gradient_norm;

  int64_t updates() const { return scalar<int64_t>(state_.at("update_count")); }

  // Skipped because a gradient, the loss or a statistic was not finite.
  int64_t skipped_updates() const { return scalar<int64_t>(state_.at("skipped_updates")); }

  // Takes the message about the first skipped update.
  std::function<void(const std::string&)> on_warning = [](const std::string& message) { std::cerr << message << std::endl; };

  // A forward and backward pass, and the update where the gradients of enough passes are accumulated. Returns the
  // loss of the batch, which says nothing of the update: one whose gradient is not finite is skipped, with a warning at
  // the first. Throws BundleError: a feature is missing or does not fit. SkippedUpdatesError: more updates in a row
  // were skipped than `on_bad_loss.skip` of the run allows; those by which a dynamic loss scale falls do not count.
  float train_step(const Batch& batch) {
    const bool is_one_step = bundle.manifest["graphs"].contains("step");
    const auto skipped_before = skipped_updates();
    const auto scale_before = loss_scale();
    auto results = run(is_one_step ? "step" : "train", checked(batch, bundle.manifest["features"]));
    const auto loss = scalar<float>(results.at("loss"));
    if (!is_one_step) {
      if (scalar<int64_t>(state_.at("accumulated_passes")) < bundle.manifest["training"]["gradient_accumulation_steps"].get<int64_t>())
        return loss;
      results = run("update", {});
    }
    gradient_norm = scalar<float>(results.at("gradient_norm"));
    const auto message =
        watch_.after_update({updates(), skipped_updates() > skipped_before, loss_scale() < scale_before, *gradient_norm, loss});
    if (!message.empty() && on_warning) on_warning(message);
    return loss;
  }

  // Metrics over all samples of some batches, in inference mode. Throws BundleError: a feature is missing or does not
  // fit, or there is no batch.
  std::map<std::string, double> evaluate(const std::vector<Batch>& batches) {
    if (batches.empty()) throw BundleError("there are no batches to evaluate. Pass at least one.");
    std::map<std::string, double> sums, means;
    for (const auto& batch : batches)
      for (const auto& [name, value] : run("eval", checked(batch, features_of("eval")))) sums[name] += scalar<float>(value);
    for (const auto& one : bundle.manifest["metrics"])
      if (one.contains("sum") && sums[one["count"]] != 0) means[one["name"]] = sums[one["sum"]] / sums[one["count"]];
    for (const auto& one : bundle.manifest["metrics"]) {
      if (!one.contains("total_of")) continue;
      double total = 0;
      bool is_complete = true;
      for (const std::string part : one["total_of"]) {
        is_complete &= means.count(part) > 0;
        total += means.count(part) ? means[part] : 0;
      }
      if (is_complete) means.emplace(one["name"], total);
    }
    return means;
  }

  // The outputs of the model with the present weights, by name.
  Arrays predict(const Batch& inputs) {
    Arrays found;
    for (const auto& [name, value] : run("infer", checked(inputs, features_of("infer")))) found.emplace(name, copy_of(value));
    return found;
  }

  // A copy of weights, moments, running statistics, counters and accumulators, by name.
  Arrays state() const {
    Arrays found;
    for (const auto& [name, value] : state_) found.emplace(name, copy_of(value));
    return found;
  }

  // With the checksum of its tensors. Throws BundleError: it cannot be written.
  void save_state(const std::filesystem::path& path) const {
    Json about = {{"format", "onward-device"}, {"bundle", bundle.identity()}};
    if (bundle.manifest.contains("run_fields")) about["run_fields"] = bundle.manifest["run_fields"];
    const auto tensors = state();
    about["sha256"] = detail::checksum(detail::write_safetensors(tensors, Json::object()));
    detail::replace_file(path, detail::write_safetensors(tensors, about));
  }

  // Continues from a state that `save_state` of any client wrote. Throws BundleError: it is of another bundle, or no
  // state, or its tensors are not those that were saved.
  void load_state(const std::filesystem::path& path) {
    const auto source = path.string();
    if (!std::filesystem::exists(path)) throw BundleError("there is no file " + source + ".");
    const auto content = detail::read_file(path);
    const auto [tensors, about] = detail::read_safetensors(content, source);
    if (about.value("format", "") != "onward-device")
      throw BundleError(source + " is no state of a device bundle; save one with Trainer::save_state.");
    const auto identity = about.value("bundle", "");
    if (identity != bundle.identity())
      throw BundleError(source + " is a state of the bundle " + detail::short_name(identity) + "; this one is " +
                        detail::short_name(bundle.identity()) + ". Use the bundle that the state was trained with.");
    const auto expected = about.value("sha256", ""), sum = expected.empty() ? "" : detail::checksum(content);
    if (sum != expected)
      throw BundleError(source + " was changed or damaged: the SHA-256 of its tensors is " + sum + ", its header has " + expected +
                        ". Copy the state again.");
    bundle.check_state(tensors, source);
    set_state(tensors);
  }

  // The model with its present weights as one file for any ONNX runtime. Its graph is the one that was trained; for the
  // user's own graph, run `onward export MODEL --device-state`.
  void export_model(const std::filesystem::path& path) const {
    Arrays values;
    const auto& infer = bundle.manifest["graphs"]["infer"];
    for (const auto& one : infer["inputs"]) {
      const auto found = state_.find(one["name"]);
      if (found != state_.end()) values.emplace(found->first, copy_of(found->second));
    }
    const auto model = detail::read_file(bundle.folder / infer["file"].get<std::string>());
    detail::replace_file(path, detail::with_values(model, values, bundle.folder));
  }

  Bundle bundle;

 private:
  using Values = std::map<std::string, Ort::Value>;

  template <typename T>
  static T scalar(const Ort::Value& value) {
    return *value.GetTensorData<T>();
  }

  // The dynamic one; 0: there is none.
  float loss_scale() const {
    const auto found = state_.find("loss_scale");
    return found == state_.end() ? 0.0F : scalar<float>(found->second);
  }

  static Array copy_of(const Ort::Value& value) {
    const auto about = value.GetTensorTypeAndShapeInfo();
    for (const auto* name : {"float32", "int64", "bool", "float16", "float64", "int32", "uint8", "int8", "int16", "uint16", "uint32", "uint64"}) {
      const auto& kind = detail::kind_of(name);
      if (kind.onnx != about.GetElementType()) continue;
      return {name, about.GetShape(), std::string(static_cast<const char*>(value.GetTensorRawData()), kind.bytes * about.GetElementCount())};
    }
    throw BundleError("a tensor of the type " + std::to_string(about.GetElementType()) + " cannot be held here.");
  }

  void set_state(const Arrays& state) {
    Values next;
    for (const auto& [name, array] : state) {
      auto value = Ort::Value::CreateTensor(allocator_, array.shape.data(), array.shape.size(), detail::kind_of(array.dtype).onnx);
      std::memcpy(value.GetTensorMutableRawData(), array.bytes.data(), array.bytes.size());
      next.emplace(name, std::move(value));
    }
    state_ = std::move(next);
    spare_.clear();
    watch_ = SkippedUpdates(bundle.manifest["training"]);
  }

  Ort::Session& session(const std::string& graph) {
    auto& found = sessions_[graph];
    if (!found) {
      const auto path = bundle.folder / bundle.manifest["graphs"][graph]["file"].get<std::string>();
      found = std::make_unique<Ort::Session>(environment_, path.c_str(), options_);
    }
    return *found;
  }

  // The state that an output `<state>_new` is the next value of, or the end.
  Values::iterator state_of(const std::string& output) {
    const auto length = output.size();
    return length > 4 && output.substr(length - 4) == "_new" ? state_.find(output.substr(0, length - 4)) : state_.end();
  }

  // Runs a graph on the state; outputs named `<state>_new` become the state, the others are returned. The state before
  // goes into memory that the next state but one is written to: two of each are all there are.
  Values run(const std::string& graph, const Batch& features) {
    auto& opened = session(graph);
    const auto& described = bundle.manifest["graphs"][graph];
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    Ort::IoBinding binding(opened);
    Values bound;
    for (const auto& one : described["inputs"]) {
      const auto name = one["name"].get<std::string>();
      const auto given = features.find(name);
      if (given == features.end()) {
        binding.BindInput(name.c_str(), state_.at(name));
        continue;
      }
      const auto& array = given->second;
      auto* bytes = const_cast<char*>(array.bytes.data());  // the runtime takes inputs without const, and reads them
      auto value = Ort::Value::CreateTensor(memory, bytes, array.bytes.size(), array.shape.data(), array.shape.size(), detail::kind_of(array.dtype).onnx);
      binding.BindInput(name.c_str(), bound.emplace(name, std::move(value)).first->second);
    }
    for (const auto& one : described["outputs"]) {
      const auto name = one["name"].get<std::string>();
      const auto state = state_of(name);
      const auto spare = state == state_.end() ? spare_.end() : spare_.find(state->first);
      if (spare == spare_.end()) binding.BindOutput(name.c_str(), memory);
      else binding.BindOutput(name.c_str(), spare->second);
    }
    opened.Run(Ort::RunOptions{nullptr}, binding);
    auto values = binding.GetOutputValues();
    Values results;
    for (size_t index = 0; index < values.size(); ++index) {
      const auto name = described["outputs"][index]["name"].get<std::string>();
      const auto state = state_of(name);
      if (state == state_.end()) {
        results.emplace(name, std::move(values[index]));
        continue;
      }
      spare_.insert_or_assign(state->first, std::move(state->second));
      state->second = std::move(values[index]);
    }
    return results;
  }

  Json features_of(const std::string& graph) const {
    Json found = Json::array();
    for (const auto& one : bundle.manifest["graphs"][graph]["inputs"])
      if (!state_.count(one["name"])) found.push_back(one);
    return found;
  }

  // Those features of a batch that a graph reads, compared with what it expects.
  Batch checked(const Batch& batch, const Json& described) const {
    check_names(batch, described);
    Batch found;
    std::map<std::string, int64_t> sizes;
    for (const auto& one : described) {
      const auto name = one["name"].get<std::string>();
      const auto given = batch.find(name);
      if (given == batch.end()) {
        std::string others;
        for (const auto& other : batch) others += (others.empty() ? "" : ", ") + other.first;
        throw BundleError("the batch has no \"" + name + "\"; it has " + (others.empty() ? "nothing" : others) + ".");
      }
      check(name, given->second, one, sizes);
      check_numbers(name, given->second);
      found.emplace(name, given->second);
    }
    return found;
  }

  void check_names(const Batch& batch, const Json& described) const {
    std::set<std::string> known, expected;
    for (const auto& one : bundle.manifest["features"]) known.insert(one["name"]);
    for (const auto& one : features_of("infer")) known.insert(one["name"]);
    for (const auto& one : described) expected.insert(one["name"]);
    std::string unknown, listed;
    for (const auto& [name, array] : batch)
      if (!known.count(name)) unknown += (unknown.empty() ? "\"" : ", \"") + name + "\"";
    for (const auto& name : expected) listed += (listed.empty() ? "" : ", ") + name;
    if (!unknown.empty())
      throw BundleError("the batch has " + unknown + ", which no graph reads; expected " + listed + ". Leave out others, or fix the name.");
  }

  static void check(const std::string& name, const Array& array, const Json& described, std::map<std::string, int64_t>& sizes) {
    if (array.dtype != described["dtype"])
      throw BundleError("\"" + name + "\" is " + array.dtype + "; expected " + described["dtype"].get<std::string>() + ". Convert it.");
    if (!array.shape.empty() && array.shape[0] == 0)
      throw BundleError("\"" + name + "\" has the shape " + detail::text_of(array.shape) + ". Leave out batches without samples.");
    if (described["shape"].is_null()) return;
    bool fits = described["shape"].size() == array.shape.size();
    std::string listed;
    for (size_t axis = 0; axis < described["shape"].size(); ++axis) {
      const auto& size = described["shape"][axis];
      auto text = size.is_string() ? size.get<std::string>() : size.dump();
      if (fits && size.is_string() && text != "?") {
        const auto known = sizes.emplace(text, array.shape[axis]).first->second;
        fits = known == array.shape[axis];
      } else if (fits && size.is_number()) {
        fits = size.get<int64_t>() == array.shape[axis];
      }
      if (sizes.count(text)) text += "=" + std::to_string(sizes[text]);
      listed += (axis ? ", " : "") + text;
    }
    if (!fits) throw BundleError("\"" + name + "\" has the shape " + detail::text_of(array.shape) + "; expected [" + listed + "].");
  }

  // A runtime counts negative labels and indices from the end, and fails for others.
  void check_numbers(const std::string& name, const Array& array) const {
    for (const auto& one : bundle.manifest["features"]) {
      if (one["name"] != name) continue;
      if (one.contains("rows")) check_indices(name, array, one["rows"].get<int64_t>());
      if (!one.contains("classes")) continue;
      const auto classes = one["classes"].get<int64_t>();
      const auto& ignored = one["ignored_label"];
      const auto width = detail::kind_of(array.dtype).bytes;
      for (size_t place = 0; place < array.bytes.size(); place += width) {
        const auto label = static_cast<int64_t>(number_at(array, place));
        if ((0 <= label && label < classes) || (!ignored.is_null() && label == ignored.get<int64_t>())) continue;
        const auto other = ignored.is_null() ? "" : " or " + ignored.dump() + ", which does not count";
        throw BundleError("\"" + name + "\" holds the label " + std::to_string(label) + "; expected 0 to " + std::to_string(classes - 1) + other +
                          ". Fix the data, or set loss.ignore_index and write the bundle again.");
      }
    }
  }

  // Compares indices with the rows of their table, which a negative one would train the last of.
  static void check_indices(const std::string& name, const Array& array, int64_t rows) {
    const auto width = detail::kind_of(array.dtype).bytes;
    for (size_t place = 0; place < array.bytes.size(); place += width) {
      const auto index = number_at(array, place);
      if (index > -1 && index < static_cast<double>(rows)) continue;  // fractions are cut off before the lookup
      std::ostringstream found;
      found.precision(17);
      found << "\"" << name << "\" holds the index " << index << "; expected 0 to " << rows - 1 << ", since it picks rows of a table that has "
            << rows << ". "
            << (index < 0 ? "If it marks padding, write the padding's own index, and leave the padding out of the loss by labels."
                          : "Make the indices with the tokenizer or vocabulary that the model was made for.");
      throw BundleError(found.str());
    }
  }

  static double number_at(const Array& array, size_t place) {
    const auto& type = array.dtype;
    if (type == "int64") return static_cast<double>(at<int64_t>(array, place));
    if (type == "int32") return at<int32_t>(array, place);
    if (type == "int16") return at<int16_t>(array, place);
    if (type == "int8") return at<int8_t>(array, place);
    if (type == "uint64") return static_cast<double>(at<uint64_t>(array, place));
    if (type == "uint32") return at<uint32_t>(array, place);
    if (type == "uint16") return at<uint16_t>(array, place);
    if (type == "float32") return at<float>(array, place);
    if (type == "float64") return at<double>(array, place);
    return at<uint8_t>(array, place);  // and booleans
  }

  template <typename T>
  static T at(const Array& array, size_t place) {
    T value;
    std::memcpy(&value, array.bytes.data() + place, sizeof(T));
    return value;
  }

  Ort::Env environment_;
  Ort::SessionOptions options_;
  Ort::AllocatorWithDefaultOptions allocator_;
  std::map<std::string, std::unique_ptr<Ort::Session>> sessions_;
  Values state_, spare_;
  SkippedUpdates watch_{Json::object()};
};

}  // namespace onward
