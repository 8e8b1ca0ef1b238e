#include "tools/generate.h"

#include <executorch/extension/tensor/tensor.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "core/c_api.h"
#include "tools/tokenizer.h"

namespace kernel_pytorch {
namespace {

using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::runtime::EValue;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The whole numbers that a method without inputs returns; false if there is no such method.
bool constants(Module& module, const std::string& name, std::vector<int64_t>& found) {
  const auto result = module.execute(name);
  if (!result.ok()) return false;
  for (const EValue& value : result.get()) {
    if (value.isInt()) found.push_back(value.toInt());
  }
  return true;
}

int64_t choose(const float* logits, int64_t count, const Generation& how, std::mt19937_64& random) {
  const int64_t best = std::max_element(logits, logits + count) - logits;
  if (how.temperature == 0) return best;
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> weights(order.size());
  double all = 0;
  for (int64_t n = 0; n < count; ++n) {
    const double weight =
        std::exp((static_cast<double>(logits[n]) - static_cast<double>(logits[best])) / how.temperature);
    weights[static_cast<size_t>(n)] = weight;
    all += weight;
  }
  size_t kept = order.size();
  double sum = all;
  if (how.top_p < 1) {  // the fewest tokens whose probabilities sum to at least top_p
    const auto more_likely = [&](int64_t a, int64_t b) {
      return weights[static_cast<size_t>(a)] > weights[static_cast<size_t>(b)];
    };
    std::sort(order.begin(), order.end(), more_likely);
    sum = 0;
    for (kept = 0; kept < order.size() && sum < how.top_p * all; ++kept) {
      sum += weights[static_cast<size_t>(order[kept])];
    }
  }
  double left = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
  for (size_t n = 0; n < kept; ++n) {
    left -= weights[static_cast<size_t>(order[n])];
    if (left < 0) return order[n];
  }
  return order[kept - 1];
}

bool read_ids(std::vector<int64_t>& ids, std::string& problem) {
  for (int64_t id = 0; std::cin >> id;) ids.push_back(id);
  if (!std::cin.eof()) {
    problem = "the standard input has something else than token ids; --prompt takes text";
  } else if (ids.empty()) {
    problem = "the standard input has no token ids; --prompt takes text";
  }
  return problem.empty();
}

std::string beside(const std::string& model, const char* name) {
  const size_t slash = model.rfind('/');
  return (slash == std::string::npos ? std::string() : model.substr(0, slash + 1)) + name;
}

}  // namespace

bool generate(Module& module, const std::string& model, const Generation& how, std::string& problem) {
  const auto begin = Clock::now();
  std::vector<int64_t> chunk, context, ends, ids;
  if (!constants(module, "get_max_seq_len", chunk) || !constants(module, "get_max_context_len", context) ||
      !constants(module, "get_eos_ids", ends) || chunk.size() != 1 || context.size() != 1 || chunk[0] < 1) {
    problem = model + " is no language model: make it with kernel-pytorch lower --hf";
    return false;
  }
  std::unique_ptr<Tokenizer> tokenizer;
  if (how.prompt.empty()) {
    if (!read_ids(ids, problem)) return false;
  } else {
    tokenizer = load_tokenizer(how.tokenizer.empty() ? beside(model, "tokenizer.json") : how.tokenizer, problem);
    if (!tokenizer) return false;
    // The ids that the model's tokenizer puts before every text, which the library does not read from the file.
    constants(module, "get_prompt_prefix", ids);
    if (!tokenizer->encode(how.prompt, ids, problem)) return false;
  }
  if (static_cast<int64_t>(ids.size()) >= context[0]) {
    problem = "the prompt has " + std::to_string(ids.size()) + " tokens and the context " + std::to_string(context[0]);
    return false;
  }
  if (module.load_method("forward") != executorch::runtime::Error::Ok) {
    problem = model + " does not load: " + kernel_pytorch_last_error();
    return false;
  }
  const double loaded = seconds_since(begin);
  std::mt19937_64 random(how.seed);
  auto start = Clock::now();
  double first = 0;
  size_t done = 0;
  long made = 0;
  while (true) {
    const size_t part = std::min(ids.size() - done, static_cast<size_t>(chunk[0]));
    auto position = static_cast<int64_t>(done);
    const auto tokens = make_tensor_ptr({1, static_cast<SizesType>(part)}, static_cast<void*>(ids.data() + done),
                                        executorch::aten::ScalarType::Long);
    const auto at = make_tensor_ptr({1}, static_cast<void*>(&position), executorch::aten::ScalarType::Long);
    const auto result = module.execute("forward", {EValue(tokens), EValue(at)});
    if (!result.ok()) {
      problem = std::string("forward failed: ") + kernel_pytorch_last_error();
      return false;
    }
    done += part;
    if (done < ids.size()) continue;
    const auto& logits = result->at(0).toTensor();
    if (logits.scalar_type() != executorch::aten::ScalarType::Float || logits.numel() == 0) {
      problem = model + " returns no logits in float32";
      return false;
    }
    const int64_t vocabulary = logits.size(logits.dim() - 1);
    const float* const last = logits.const_data_ptr<float>() + logits.numel() - vocabulary;
    const int64_t id = choose(last, vocabulary, how, random);
    if (made++ == 0) {
      first = seconds_since(start);
      start = Clock::now();
    }
    const bool ended = std::find(ends.begin(), ends.end(), id) != ends.end();
    if (!tokenizer) {
      std::printf("%lld\n", static_cast<long long>(id));
    } else if (!ended) {
      std::string text;
      if (!tokenizer->decode(ids.back(), id, text, problem)) return false;
      std::fwrite(text.data(), 1, text.size(), stdout);
    }
    std::fflush(stdout);
    if (ended || made == how.tokens || static_cast<int64_t>(ids.size()) >= context[0]) break;
    ids.push_back(id);
  }
  if (tokenizer) std::printf("\n");
  const double rate = made > 1 ? static_cast<double>(made - 1) / seconds_since(start) : 0;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::fprintf(stderr,
               "loaded in %.3f s, first token after %.3f s, %ld tokens at %.1f tokens/s, %.0f MB of memory at most\n",
               loaded, first, made, rate, static_cast<double>(usage.ru_maxrss) * 1024 / 1e6);
  return true;
}

}  // namespace kernel_pytorch
