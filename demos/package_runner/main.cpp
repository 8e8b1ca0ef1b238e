// Runs a .pt2 package with libtorch alone: no Python, and nothing of KernelPyTorch.
//
//   package_runner model.pt2 cpu 1,20,64 x.bin y.bin
//
// x.bin has the float32 numbers of one input of shape 1x20x64, y.bin gets those of the first output.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> found;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) found.push_back(std::stoll(part));
  return found;
}

torch::Tensor read(const std::string& path, const std::vector<int64_t>& shape) {
  torch::Tensor x = torch::empty(shape, torch::kFloat32);
  std::ifstream file(path, std::ios::binary);
  if (!file.read(static_cast<char*>(x.data_ptr()), static_cast<std::streamsize>(x.nbytes()))) {
    throw std::runtime_error(path + " has fewer bytes than its shape: " + std::to_string(x.nbytes()));
  }
  return x;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) {
    std::cerr << "usage: package_runner MODEL.pt2 DEVICE SHAPE INPUT OUTPUT\n";
    return 2;
  }
  // Compiled code does not look at the shapes of its inputs unless it is asked to.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
  try {
    const c10::InferenceMode mode;
    torch::inductor::AOTIModelPackageLoader package(arguments[1]);
    const torch::Tensor x = read(arguments[4], numbers(arguments[3])).to(torch::Device(arguments[2]));
    const std::vector<torch::Tensor> outputs = package.run({x});
    const torch::Tensor y = outputs.at(0).to(torch::kCPU, torch::kFloat32).contiguous();
    std::ofstream file(arguments[5], std::ios::binary);
    file.write(static_cast<const char*>(y.data_ptr()), static_cast<std::streamsize>(y.nbytes()));
    file.close();
    if (!file) throw std::runtime_error(std::string(arguments[5]) + " cannot be written");
    std::cout << "output of shape " << y.sizes() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
