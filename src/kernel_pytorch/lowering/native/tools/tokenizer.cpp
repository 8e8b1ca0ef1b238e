#include "tools/tokenizer.h"

#if defined(KERNEL_PYTORCH_WITH_TOKENIZERS)
#include <pytorch/tokenizers/hf_tokenizer.h>
#endif

namespace kernel_pytorch {

#if defined(KERNEL_PYTORCH_WITH_TOKENIZERS)
namespace {

// tokenizer.json, read by pytorch/tokenizers.
class HuggingFaceTokenizer final : public Tokenizer {
 public:
  bool load(const std::string& path) { return library_.load(path) == tokenizers::Error::Ok; }

  bool encode(const std::string& text, std::vector<int64_t>& ids, std::string& problem) override {
    const auto found = library_.encode(text, /*bos=*/0, /*eos=*/0);
    if (!found.ok()) {
      problem = "the tokenizer cannot encode the prompt";
      return false;
    }
    ids.insert(ids.end(), found.get().begin(), found.get().end());
    return true;
  }

  bool decode(int64_t before, int64_t id, std::string& text, std::string& problem) override {
    const auto found = library_.decode(static_cast<uint64_t>(before), static_cast<uint64_t>(id));
    if (!found.ok()) {
      problem = "the tokenizer has no token " + std::to_string(id);
      return false;
    }
    text = found.get();
    return true;
  }

 private:
  tokenizers::HFTokenizer library_;
};

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path, std::string& problem) {
  auto made = std::make_unique<HuggingFaceTokenizer>();
  if (made->load(path)) return made;
  problem = path + " is no tokenizer.json that can be read: pass its path with --tokenizer";
  return nullptr;
}
#else
std::unique_ptr<Tokenizer> load_tokenizer(const std::string&, std::string& problem) {
  problem =
      "--prompt needs a runner that was built with pytorch/tokenizers: set KERNEL_PYTORCH_TOKENIZERS to the folder of "
      "its sources and run kernel-pytorch build-runtime, or pass token ids on the standard input";
  return nullptr;
}
#endif

}  // namespace kernel_pytorch
