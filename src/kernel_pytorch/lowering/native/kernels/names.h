// Names made of macros: KP_CONCAT(kernels_for_, KP_TARGET_NAME) is kernels_for_avx2.
#pragma once

#define KP_CONCAT_EXPANDED(a, b) a##b
#define KP_CONCAT(a, b) KP_CONCAT_EXPANDED(a, b)
#define KP_STRING_EXPANDED(a) #a
#define KP_STRING(a) KP_STRING_EXPANDED(a)
