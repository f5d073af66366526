// Tensors as the loops see them, over the C functions of LibTorch's stable interface: what is compiled with them runs
// with every PyTorch from 2.11 on, and compiling needs no PyTorch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"

// As torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h declare them; a test compiles both. What
// can fail returns 0 where it did not.
extern "C" {
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using AOTITorchError = int32_t;

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
size_t aoti_torch_dtype_element_size(int32_t);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle, const void**);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle, void**);
AOTITorchError aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                                        AtenTensorHandle*);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
AOTITorchError torch_parallel_for(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
AOTITorchError torch_get_num_threads(uint32_t*);
}

namespace structattn {

[[noreturn]] inline void fail(const char* message) { throw std::runtime_error(message); }

inline void check(bool holds, const char* message) {
  if (!holds) fail(message);
}

// What PyTorch says was wrong, it has printed.
inline void succeed(AOTITorchError code) { check(code == 0, "structattn_native: a function of PyTorch failed"); }

template <typename T>
int32_t dtype_of() {
  if constexpr (std::is_same_v<T, bool>) return aoti_torch_dtype_bool();
  if constexpr (std::is_same_v<T, uint8_t>) return aoti_torch_dtype_uint8();
  if constexpr (std::is_same_v<T, int32_t>) return aoti_torch_dtype_int32();
  if constexpr (std::is_same_v<T, int64_t>) return aoti_torch_dtype_int64();
  if constexpr (std::is_same_v<T, BFloat16>) return aoti_torch_dtype_bfloat16();
  if constexpr (std::is_same_v<T, Half>) return aoti_torch_dtype_float16();
  if constexpr (std::is_same_v<T, float>) return aoti_torch_dtype_float32();
  if constexpr (std::is_same_v<T, double>) return aoti_torch_dtype_float64();
}

// A reference to a tensor on a CPU.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    succeed(aoti_torch_get_dim(handle, &dim_));
    succeed(aoti_torch_get_sizes(handle, &sizes_));
    succeed(aoti_torch_get_strides(handle, &strides_));
    succeed(aoti_torch_get_dtype(handle, &dtype_));
  }
  Tensor(Tensor&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)),
        dim_(other.dim_),
        sizes_(other.sizes_),
        strides_(other.strides_),
        dtype_(other.dtype_) {}
  Tensor& operator=(Tensor&&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  int64_t dim() const { return dim_; }
  int64_t size(int64_t n) const { return sizes_[n]; }
  int64_t stride(int64_t n) const { return strides_[n]; }
  int64_t numel() const {
    int64_t numbers = 1;
    for (int64_t n = 0; n < dim_; ++n) numbers *= sizes_[n];
    return numbers;
  }
  int32_t dtype() const { return dtype_; }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_)); }
  bool is_contiguous() const {
    if (numel() == 0) return true;
    int64_t stride = 1;
    for (int64_t n = dim_; n-- > 0; stride *= sizes_[n])
      if (sizes_[n] != 1 && strides_[n] != stride) return false;
    return true;
  }

  const void* const_data_ptr() const {
    const void* data = nullptr;
    succeed(torch_get_const_data_ptr(handle_, &data));
    return data;
  }
  template <typename T>
  const T* const_data_ptr() const {
    check(dtype_ == dtype_of<T>(), "structattn_native: a tensor has another dtype than the call says");
    return static_cast<const T*>(const_data_ptr());
  }
  template <typename T>
  T* data_ptr() const {
    check(dtype_ == dtype_of<T>(), "structattn_native: a tensor has another dtype than the call says");
    void* data = nullptr;
    succeed(torch_get_mutable_data_ptr(handle_, &data));
    return static_cast<T*>(data);
  }

  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
  int64_t dim_ = 0, *sizes_ = nullptr, *strides_ = nullptr;
  int32_t dtype_ = 0;
};

// Whether a tensor has these sizes, -1 for any.
inline bool has_sizes(const Tensor& x, std::initializer_list<int64_t> sizes) {
  if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t n = 0;
  for (const int64_t size : sizes)
    if (const int64_t own = x.size(n++); size >= 0 && own != size) return false;
  return true;
}

// A new tensor, whose numbers are not set.
inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t dtype) {
  AtenTensorHandle handle = nullptr;
  succeed(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                   aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t n = sizes.size(); n-- > 1;) strides[n - 1] = strides[n] * std::max<int64_t>(sizes[n], 1);
  return empty_strided(sizes, strides, dtype);
}

// Memory for numbers of one call, which are not set, in whole lines of the caches.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T), kLine))) {}
  T* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Delete {
    void operator()(T* x) const { ::operator delete(x, kLine); }
  };
  std::unique_ptr<T, Delete> data_;
};

inline int64_t num_threads() {
  uint32_t count = 1;
  succeed(torch_get_num_threads(&count));
  return count;
}

// Calls f(begin, end) for ranges that make up `count`, in PyTorch's threads.
template <typename F>
void parallel_for(int64_t count, const F& f) {
  const auto call = [](int64_t begin, int64_t end, void* x) { (*static_cast<const F*>(x))(begin, end); };
  succeed(torch_parallel_for(0, count, 1, call, const_cast<void*>(static_cast<const void*>(&f))));
}

}  // namespace structattn
