// Runs any .pte:
//
//   kernel_pytorch_runner model.pte [--method NAME] [--input FILE [--shape D,D...]]... [--output FILE] [--repeat N]
//
// Each --method begins another call; calls run in order on the one loaded program, so that a prefill and the decodes
// after it share their caches. An input file holds the numbers of one tensor as they are in memory, in the shape that
// the method was lowered for or in the one given; inputs without a file are ones. The first output is written to the
// output file in the same way. Links neither Python nor torch.
//
//   kernel_pytorch_runner model.pte --generate N [--temperature T] [--seed S]
//
// generates N tokens with a language model that `kernel-pytorch lower --hf` made: token ids are read from the standard
// input and written to the standard output as they come, one a line. Greedy without a temperature.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/platform/runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "core/c_api.h"

using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;

namespace {

struct Input {
  std::string path;
  std::vector<SizesType> shape;  // empty: as lowered
};

struct Call {
  std::string method = "forward", output;
  std::vector<Input> inputs;
  long repeat = 1;
};

int usage(const std::string& problem) {
  std::fprintf(stderr,
               "kernel_pytorch_runner: %s\nusage: kernel_pytorch_runner model.pte [--method NAME] [--input FILE "
               "[--shape D,D...]]... [--output FILE] [--repeat N]\n       kernel_pytorch_runner model.pte --generate N "
               "[--temperature T] [--seed S] < ids\n",
               problem.c_str());
  return 2;
}

int failed(const std::string& what, Error error) {
  const std::string reason = kernel_pytorch_last_error();
  std::fprintf(stderr, "kernel_pytorch_runner: %s: error 0x%x%s%s\n", what.c_str(), static_cast<unsigned>(error),
               reason.empty() ? "" : ": ", reason.c_str());
  return 1;
}

bool read_file(const std::string& path, std::vector<char>& bytes) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return false;
  bytes.resize(static_cast<size_t>(file.tellg()));
  file.seekg(0);
  return static_cast<bool>(file.read(bytes.data(), static_cast<std::streamsize>(bytes.size())));
}

bool read_shape(const std::string& text, std::vector<SizesType>& shape) {
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    char* rest = nullptr;
    const std::string one = text.substr(at, end - at);
    const long size = std::strtol(one.c_str(), &rest, 10);
    if (one.empty() || *rest != 0 || size < 0 || size > INT32_MAX) return false;
    shape.push_back(static_cast<SizesType>(size));
    at = end + 1;
  }
  return true;
}

template <typename Number>
void fill_ones(std::vector<char>& bytes, Number one) {
  for (size_t n = 0; n + sizeof(one) <= bytes.size(); n += sizeof(one)) {
    std::memcpy(bytes.data() + n, &one, sizeof(one));
  }
}

int run(Module& module, const std::string& model, const Call& call) {
  const auto loaded = module.load_method(call.method);
  if (loaded != Error::Ok) return failed(call.method + " of " + model + " does not load", loaded);
  const auto meta = module.method_meta(call.method);
  if (!meta.ok()) return usage("the method has no description");
  if (call.inputs.size() > meta->num_inputs()) {
    return usage(call.method + " takes " + std::to_string(meta->num_inputs()) + " inputs");
  }

  std::vector<std::vector<char>> data(meta->num_inputs());
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<EValue> arguments;
  for (size_t n = 0; n < meta->num_inputs(); ++n) {
    const auto info = meta->input_tensor_meta(n);
    if (!info.ok()) return usage("an input is not a tensor");
    std::vector<SizesType> sizes(info->sizes().begin(), info->sizes().end());
    size_t wanted = info->nbytes();
    if (n < call.inputs.size()) {
      const Input& given = call.inputs[n];
      if (!given.shape.empty()) {
        sizes = given.shape;
        wanted = executorch::runtime::elementSize(info->scalar_type());
        for (const SizesType size : sizes) wanted *= static_cast<size_t>(size);
      }
      if (!read_file(given.path, data[n])) return usage(given.path + " cannot be read");
      if (data[n].size() != wanted) {
        return usage(given.path + " has " + std::to_string(data[n].size()) + " bytes; input " + std::to_string(n) +
                     " takes " + std::to_string(wanted));
      }
    } else {
      data[n].resize(wanted);
      if (info->scalar_type() == executorch::aten::ScalarType::Float) fill_ones(data[n], 1.0f);
      if (info->scalar_type() == executorch::aten::ScalarType::Long) fill_ones(data[n], int64_t{1});
    }
    tensors.push_back(make_tensor_ptr(sizes, data[n].data(), info->scalar_type()));
    arguments.emplace_back(tensors.back());
  }

  double least = 0;
  for (long n = 0; n < call.repeat; ++n) {
    const auto start = std::chrono::steady_clock::now();
    const auto result = module.execute(call.method, arguments);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (!result.ok()) return failed(call.method + " failed", result.error());
    least = n == 0 || took.count() < least ? took.count() : least;
    if (n + 1 == call.repeat && !call.output.empty()) {
      const auto& tensor = result->at(0).toTensor();
      std::ofstream file(call.output, std::ios::binary);
      file.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
      if (!file) return usage(call.output + " cannot be written");
    }
  }
  std::printf("%s: %s ran %ld times, fastest %.3f ms\n", model.c_str(), call.method.c_str(), call.repeat, least);
  return 0;
}

struct Generation {
  long tokens = 0;  // 0: not asked for
  double temperature = 0;
  uint64_t seed = 0;
};

// The whole numbers that a method without inputs returns; false if there is no such method.
bool constants(Module& module, const std::string& name, std::vector<int64_t>& found) {
  const auto result = module.execute(name);
  if (!result.ok()) return false;
  for (const EValue& value : result.get()) {
    if (value.isInt()) found.push_back(value.toInt());
  }
  return true;
}

int64_t choose(const float* logits, int64_t count, double temperature, std::mt19937_64& random) {
  const int64_t best = std::max_element(logits, logits + count) - logits;
  if (temperature == 0) return best;
  std::vector<double> sums(static_cast<size_t>(count));
  double sum = 0;
  for (int64_t n = 0; n < count; ++n) {
    sum += std::exp((static_cast<double>(logits[n]) - static_cast<double>(logits[best])) / temperature);
    sums[static_cast<size_t>(n)] = sum;
  }
  const double share = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
  return std::min(std::upper_bound(sums.begin(), sums.end(), share) - sums.begin(), std::ptrdiff_t{count - 1});
}

int generate(Module& module, const std::string& model, const Generation& how) {
  std::vector<int64_t> chunk, context, ends, ids;
  if (!constants(module, "get_max_seq_len", chunk) || !constants(module, "get_max_context_len", context) ||
      !constants(module, "get_eos_ids", ends) || chunk.size() != 1 || context.size() != 1 || chunk[0] < 1) {
    return usage(model + " is no language model: make it with kernel-pytorch lower --hf");
  }
  for (int64_t id = 0; std::cin >> id;) ids.push_back(id);
  if (!std::cin.eof()) return usage("the standard input has something else than token ids");
  if (ids.empty()) return usage("the standard input has no token ids");
  if (static_cast<int64_t>(ids.size()) >= context[0]) {
    return usage("the prompt has " + std::to_string(ids.size()) + " tokens and the context " +
                 std::to_string(context[0]));
  }
  std::mt19937_64 random(how.seed);
  const auto start = std::chrono::steady_clock::now();
  auto first = start;
  size_t done = 0;
  long made = 0;
  while (true) {
    const size_t part = std::min(ids.size() - done, static_cast<size_t>(chunk[0]));
    auto position = static_cast<int64_t>(done);
    const auto tokens = make_tensor_ptr({1, static_cast<SizesType>(part)}, static_cast<void*>(ids.data() + done),
                                        executorch::aten::ScalarType::Long);
    const auto at = make_tensor_ptr({1}, static_cast<void*>(&position), executorch::aten::ScalarType::Long);
    const auto result = module.execute("forward", {EValue(tokens), EValue(at)});
    if (!result.ok()) return failed("forward failed", result.error());
    done += part;
    if (done < ids.size()) continue;
    const auto& logits = result->at(0).toTensor();
    if (logits.scalar_type() != executorch::aten::ScalarType::Float || logits.numel() == 0) {
      return usage(model + " returns no logits in float32");
    }
    const int64_t vocabulary = logits.size(logits.dim() - 1);
    const float* const last = logits.const_data_ptr<float>() + logits.numel() - vocabulary;
    const int64_t id = choose(last, vocabulary, how.temperature, random);
    if (made++ == 0) first = std::chrono::steady_clock::now();
    std::printf("%lld\n", static_cast<long long>(id));
    std::fflush(stdout);
    const bool ended = std::find(ends.begin(), ends.end(), id) != ends.end();
    if (ended || made == how.tokens || static_cast<int64_t>(ids.size()) >= context[0]) break;
    ids.push_back(id);
  }
  const std::chrono::duration<double> prompt = first - start, decode = std::chrono::steady_clock::now() - first;
  const double rate = made > 1 ? static_cast<double>(made - 1) / decode.count() : 0;
  std::fprintf(stderr, "first token after %.3f s, %ld tokens at %.1f tokens/s\n", prompt.count(), made, rate);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  std::string model;
  std::vector<Call> calls(1);
  Generation generation;
  bool named = false;
  for (int n = 1; n < count; ++n) {
    const std::string word = words[n];
    if (word.rfind("--", 0) != 0) {
      if (!model.empty()) return usage("two programs were named: " + model + " and " + word);
      model = word;
      continue;
    }
    if (n + 1 >= count) return usage(word + " needs a value");
    const std::string value = words[++n];
    Call& call = calls.back();
    if (word == "--method") {
      if (named) calls.emplace_back();
      calls.back().method = value;
      named = true;
    } else if (word == "--input") {
      call.inputs.push_back({value, {}});
    } else if (word == "--shape") {
      if (call.inputs.empty() || !read_shape(value, call.inputs.back().shape)) {
        return usage("--shape " + value + ": give it after an --input, as 1,20");
      }
    } else if (word == "--output") {
      call.output = value;
    } else if (word == "--repeat") {
      call.repeat = std::strtol(value.c_str(), nullptr, 10);
      if (call.repeat < 1) return usage("--repeat needs a whole number of at least 1");
    } else if (word == "--generate") {
      generation.tokens = std::strtol(value.c_str(), nullptr, 10);
      if (generation.tokens < 1) return usage("--generate needs a whole number of at least 1");
    } else if (word == "--temperature") {
      char* rest = nullptr;
      generation.temperature = std::strtod(value.c_str(), &rest);
      if (value.empty() || *rest != 0 || !(generation.temperature >= 0 && std::isfinite(generation.temperature))) {
        return usage("--temperature needs a number of at least 0");
      }
    } else if (word == "--seed") {
      generation.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else {
      return usage(word + " is no option");
    }
  }
  if (model.empty()) return usage("name a .pte file");

  // Mapped, so that methods share the memory of their weights.
  Module module(model, Module::LoadMode::Mmap);
  if (generation.tokens > 0) return generate(module, model, generation);
  for (const Call& call : calls) {
    if (const int status = run(module, model, call)) return status;
  }
  return 0;
}
