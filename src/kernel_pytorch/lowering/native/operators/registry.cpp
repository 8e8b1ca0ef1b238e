// The list of operators. To add one, write operators/<name>.cpp and add its line here and in registry.h, and its code
// in core/format.h and in payload.py.
//
// The list is explicit because linkers drop objects of a static library that only register themselves.
#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

using format::OpCode;

constexpr OperatorEntry kOperators[] = {
    {OpCode::kAttention, "attention", make_attention},
    {OpCode::kRmsNorm, "rms_norm", make_rms_norm},
    {OpCode::kLayerNorm, "layer_norm", make_layer_norm},
    {OpCode::kSoftmax, "softmax", make_softmax},
    {OpCode::kPointwise, "pointwise", make_pointwise},
    {OpCode::kReduce, "reduce", make_reduce},
    {OpCode::kLinear, "linear", make_linear},
    {OpCode::kCacheWrite, "cache_write", make_cache_write},
    {OpCode::kCachedAttention, "cached_attention", make_cached_attention},
    {OpCode::kQuantizedLinear, "quantized_linear", make_quantized_linear},
    {OpCode::kAttentionBackward, "attention_backward", make_attention_backward},
};

}  // namespace

const OperatorEntry* find_operator(uint32_t code) {
  for (const OperatorEntry& entry : kOperators) {
    if (static_cast<uint32_t>(entry.code) == code) return &entry;
  }
  return nullptr;
}

}  // namespace kernel_pytorch
