// Text to token ids and back, by the tokenizer library that the runner was built with, if any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kernel_pytorch {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Appends the ids of a text.
  virtual bool encode(const std::string& text, std::vector<int64_t>& ids, std::string& problem) = 0;
  // The text that a token adds after the one before it. It may end inside a character.
  virtual bool decode(int64_t before, int64_t id, std::string& text, std::string& problem) = 0;
};

// Null with a problem if the file is none that the library reads, or if the runner was built without one.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path, std::string& problem);

}  // namespace kernel_pytorch
