// Generates with a language model that `kernel-pytorch lower --hf` made: text from text where the runner was built with
// a tokenizer library, token ids from token ids always.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <string>

namespace kernel_pytorch {

struct Generation {
  long tokens = 0;         // the most to generate
  std::string prompt;      // text; empty: token ids from the standard input, and ids as lines on the standard output
  std::string tokenizer;   // tokenizer.json; empty: the one beside the program
  double temperature = 0;  // 0: greedy
  double top_p = 1;
  uint64_t seed = 0;
};

// Writes to the standard output as tokens come, then time and memory to the standard error. False with a problem if
// the program, the prompt or the tokenizer does not fit.
bool generate(executorch::extension::Module& module, const std::string& model, const Generation& how,
              std::string& problem);

}  // namespace kernel_pytorch
