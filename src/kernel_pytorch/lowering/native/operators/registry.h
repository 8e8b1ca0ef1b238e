// The constructors of all operators, each defined in the file of its name.
#pragma once

#include <memory>

#include "core/operator.h"

namespace kernel_pytorch {

std::unique_ptr<Operator> make_attention();
std::unique_ptr<Operator> make_rms_norm();
std::unique_ptr<Operator> make_layer_norm();
std::unique_ptr<Operator> make_softmax();
std::unique_ptr<Operator> make_pointwise();
std::unique_ptr<Operator> make_reduce();
std::unique_ptr<Operator> make_linear();
std::unique_ptr<Operator> make_cache_write();
std::unique_ptr<Operator> make_cached_attention();
std::unique_ptr<Operator> make_quantized_linear();
std::unique_ptr<Operator> make_attention_backward();

}  // namespace kernel_pytorch
