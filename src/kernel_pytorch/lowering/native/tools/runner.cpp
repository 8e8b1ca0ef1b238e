// Runs any .pte: kernel_pytorch_runner model.pte [--method forward] [--input file.bin]... [--output file.bin] [--repeat n]
//
// An input file holds the numbers of one tensor as they are in memory; inputs without a file are ones. The first
// output is written to the output file in the same way. Links neither Python nor torch.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/platform/runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::runtime::EValue;

namespace {

int usage(const char* problem) {
  std::fprintf(stderr,
               "kernel_pytorch_runner: %s\nusage: kernel_pytorch_runner model.pte [--method NAME] [--input FILE]... "
               "[--output FILE] [--repeat N]\n",
               problem);
  return 2;
}

bool read_file(const std::string& path, std::vector<char>& bytes) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return false;
  bytes.resize(static_cast<size_t>(file.tellg()));
  file.seekg(0);
  return static_cast<bool>(file.read(bytes.data(), static_cast<std::streamsize>(bytes.size())));
}

template <typename Number>
void fill_ones(std::vector<char>& bytes, Number one) {
  for (size_t n = 0; n + sizeof(one) <= bytes.size(); n += sizeof(one)) std::memcpy(bytes.data() + n, &one, sizeof(one));
}

}  // namespace

int main(int count, char** words) {
  std::string model, method = "forward", output;
  std::vector<std::string> inputs;
  long repeat = 1;
  for (int n = 1; n < count; ++n) {
    const std::string word = words[n];
    const bool option = word.rfind("--", 0) == 0;
    if (!option) {
      model = word;
      continue;
    }
    if (n + 1 >= count) return usage((word + " needs a value").c_str());
    const std::string value = words[++n];
    if (word == "--method") {
      method = value;
    } else if (word == "--input") {
      inputs.push_back(value);
    } else if (word == "--output") {
      output = value;
    } else if (word == "--repeat") {
      repeat = std::strtol(value.c_str(), nullptr, 10);
      if (repeat < 1) return usage("--repeat needs a whole number of at least 1");
    } else {
      return usage((word + " is no option").c_str());
    }
  }
  if (model.empty()) return usage("name a .pte file");

  Module module(model);
  const auto loaded = module.load_method(method);
  if (loaded != executorch::runtime::Error::Ok) {
    std::fprintf(stderr, "kernel_pytorch_runner: %s of %s does not load: error 0x%x\n", method.c_str(), model.c_str(),
                 static_cast<unsigned>(loaded));
    return 1;
  }
  const auto meta = module.method_meta(method);
  if (!meta.ok()) return usage("the method has no description");

  std::vector<std::vector<char>> data(meta->num_inputs());
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<EValue> arguments;
  for (size_t n = 0; n < meta->num_inputs(); ++n) {
    const auto info = meta->input_tensor_meta(n);
    if (!info.ok()) return usage("an input is not a tensor");
    if (n < inputs.size()) {
      if (!read_file(inputs[n], data[n])) return usage((inputs[n] + " cannot be read").c_str());
      if (data[n].size() != info->nbytes()) {
        return usage((inputs[n] + " has " + std::to_string(data[n].size()) + " bytes; input " + std::to_string(n) +
                      " takes " + std::to_string(info->nbytes()))
                         .c_str());
      }
    } else {
      data[n].resize(info->nbytes());
      if (info->scalar_type() == executorch::aten::ScalarType::Float) fill_ones(data[n], 1.0f);
      if (info->scalar_type() == executorch::aten::ScalarType::Long) fill_ones(data[n], int64_t{1});
    }
    std::vector<executorch::aten::SizesType> sizes(info->sizes().begin(), info->sizes().end());
    tensors.push_back(make_tensor_ptr(sizes, data[n].data(), info->scalar_type()));
    arguments.emplace_back(tensors.back());
  }

  std::vector<double> milliseconds;
  for (long n = 0; n < repeat; ++n) {
    const auto start = std::chrono::steady_clock::now();
    const auto result = module.execute(method, arguments);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (!result.ok()) {
      std::fprintf(stderr, "kernel_pytorch_runner: %s failed: error 0x%x\n", method.c_str(),
                   static_cast<unsigned>(result.error()));
      return 1;
    }
    milliseconds.push_back(took.count());
    if (n + 1 == repeat && !output.empty()) {
      const auto& tensor = result->at(0).toTensor();
      std::ofstream file(output, std::ios::binary);
      file.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
      if (!file) return usage((output + " cannot be written").c_str());
    }
  }
  double least = milliseconds[0];
  for (double one : milliseconds) least = one < least ? one : least;
  std::printf("%s: %s ran %ld times, fastest %.3f ms\n", model.c_str(), method.c_str(), repeat, least);
  return 0;
}
