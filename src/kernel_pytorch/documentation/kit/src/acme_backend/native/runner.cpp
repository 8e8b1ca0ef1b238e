// Runs a .pte in C++, without Python and without torch: acme_runner model.pte [input.bin output.bin]
//
// The input file holds the numbers of the first input as they are in memory, and the output file gets those of the
// first output; without files every input is ones.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <cstdio>
#include <fstream>
#include <vector>

using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::runtime::EValue;

namespace {

int fail(const char* problem, const char* what) {
  std::fprintf(stderr, "acme_runner: %s %s\nusage: acme_runner model.pte [input.bin output.bin]\n", what, problem);
  return 1;
}

}  // namespace

int main(int count, char** words) {
  if (count != 2 && count != 4) return fail("is needed, alone or with two files", "a .pte file");
  Module module(words[1]);
  if (module.load_method("forward") != executorch::runtime::Error::Ok) return fail("does not load", words[1]);
  const auto meta = module.method_meta("forward");
  if (!meta.ok()) return fail("has no method 'forward'", words[1]);

  std::vector<std::vector<float>> data(meta->num_inputs());
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<EValue> arguments;
  for (size_t n = 0; n < meta->num_inputs(); ++n) {
    const auto info = meta->input_tensor_meta(n);
    if (!info.ok() || info->scalar_type() != executorch::aten::ScalarType::Float) {
      return fail("has an input that is no float32 tensor", words[1]);
    }
    data[n].assign(info->nbytes() / sizeof(float), 1.0f);
    if (n == 0 && count == 4) {
      std::ifstream file(words[2], std::ios::binary);
      const auto bytes = static_cast<std::streamsize>(info->nbytes());
      if (!file.read(reinterpret_cast<char*>(data[n].data()), bytes) || file.peek() != EOF) {
        return fail("does not hold the first input", words[2]);
      }
    }
    std::vector<executorch::aten::SizesType> sizes(info->sizes().begin(), info->sizes().end());
    tensors.push_back(make_tensor_ptr(sizes, data[n].data()));
    arguments.emplace_back(tensors.back());
  }

  const auto result = module.execute("forward", arguments);
  if (!result.ok()) return fail("failed to run", words[1]);
  const auto& output = result->at(0).toTensor();
  const float* numbers = output.const_data_ptr<float>();
  double sum = 0;
  for (ssize_t n = 0; n < output.numel(); ++n) sum += numbers[n];
  std::printf("%zd numbers, mean %.6g\n", static_cast<size_t>(output.numel()), sum / output.numel());
  if (count == 4) {
    std::ofstream file(words[3], std::ios::binary);
    file.write(reinterpret_cast<const char*>(numbers), static_cast<std::streamsize>(output.nbytes()));
    if (!file) return fail("cannot be written", words[3]);
  }
  return 0;
}
