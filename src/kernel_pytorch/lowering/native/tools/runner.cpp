// Runs any .pte:
//
//   kernel_pytorch_runner model.pte [--method NAME] [--input FILE [--shape D,D...]]... [--output FILE] [--repeat N]
//
// Each --method begins another call; calls run in order on the one loaded program, so that a prefill and the decodes
// after it share their caches. An input file holds the numbers of one tensor as they are in memory, in the shape that
// the method was lowered for or in the one given; inputs without a file are ones. The first output is written to the
// output file in the same way. Links neither Python nor torch.
//
//   kernel_pytorch_runner model.pte --generate N [--prompt TEXT] [--tokenizer FILE] [--temperature T] [--top-p P]
//                         [--seed S] [--skip-checksums yes]
//
// generates N tokens with a language model that `kernel-pytorch lower --hf` made; see generate.h.
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
#include <string>
#include <vector>

#include "core/c_api.h"
#include "tools/generate.h"

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
               "[--prompt TEXT] [--tokenizer FILE] [--temperature T] [--top-p P] [--seed S] [--skip-checksums yes]\n",
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

bool read_number(const std::string& text, double& number) {
  char* rest = nullptr;
  number = std::strtod(text.c_str(), &rest);
  return !text.empty() && *rest == 0 && std::isfinite(number);
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

}  // namespace

int main(int count, char** words) {
  std::string model;
  std::vector<Call> calls(1);
  kernel_pytorch::Generation generation;
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
    } else if (word == "--prompt") {
      generation.prompt = value;
      if (value.empty()) return usage("--prompt needs a text");
    } else if (word == "--tokenizer") {
      generation.tokenizer = value;
    } else if (word == "--temperature") {
      if (!read_number(value, generation.temperature) || generation.temperature < 0) {
        return usage("--temperature needs a number of at least 0");
      }
    } else if (word == "--top-p") {
      if (!read_number(value, generation.top_p) || !(generation.top_p > 0 && generation.top_p <= 1)) {
        return usage("--top-p needs a number above 0 and at most 1");
      }
    } else if (word == "--skip-checksums") {
      if (value != "yes") return usage("--skip-checksums takes yes, for a file that was verified before");
      kernel_pytorch_file_verified(true);
    } else if (word == "--seed") {
      generation.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else {
      return usage(word + " is no option");
    }
  }
  if (model.empty()) return usage("name a .pte file");

  // Mapped, so that methods share the memory of their weights.
  Module module(model, Module::LoadMode::Mmap);
  if (generation.tokens > 0) {
    std::string problem;
    if (kernel_pytorch::generate(module, model, generation, problem)) return 0;
    return usage(problem);
  }
  for (const Call& call : calls) {
    if (const int status = run(module, model, call)) return status;
  }
  return 0;
}
