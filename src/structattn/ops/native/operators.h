// Functions as operators of PyTorch, over the C functions of LibTorch's stable interface (see tensor.h).
#pragma once

#include "tensor.h"

#include <bit>
#include <optional>
#include <tuple>
#include <type_traits>

extern "C" {
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
using StableIValue = uint64_t;

AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t, TorchLibraryHandle*);
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle*);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char*);
AOTITorchError torch_library_impl(TorchLibraryHandle, const char*, void (*)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t);
AOTITorchError torch_list_size(StableListHandle, size_t*);
AOTITorchError torch_list_get_item(StableListHandle, size_t, StableIValue*);
AOTITorchError torch_delete_list(StableListHandle);
}

#if defined(__GLIBCXX__)
namespace std {
// Which libraries of before GCC 11 do not have, so that code that is compiled with a newer one runs with them.
void __throw_bad_array_new_length() { __throw_bad_alloc(); }
}  // namespace std
#endif

namespace structattn {

// The PyTorch whose form of arguments this is; newer ones keep to it.
constexpr uint64_t kTorch = uint64_t{2} << 56 | uint64_t{11} << 48;

// An argument as PyTorch hands it over: one that is no number belongs to the function that is called.
template <typename T>
struct Argument {
  static_assert(sizeof(T) == sizeof(StableIValue));
  static T from(StableIValue x) { return std::bit_cast<T>(x); }
};

template <>
struct Argument<Tensor> {
  static Tensor from(StableIValue x) { return Tensor(std::bit_cast<AtenTensorHandle>(x)); }
};

template <typename T>
struct Argument<std::optional<T>> {
  static std::optional<T> from(StableIValue x) {
    const std::unique_ptr<StableIValue> value(std::bit_cast<StableIValue*>(x));
    if (value == nullptr) return std::nullopt;
    return Argument<T>::from(*value);
  }
};

template <typename T>
struct Argument<std::vector<T>> {
  static std::vector<T> from(StableIValue x) {
    struct Delete {
      void operator()(StableListHandle list) const { torch_delete_list(list); }
    };
    const std::unique_ptr<StableListOpaque, Delete> list(std::bit_cast<StableListHandle>(x));
    size_t size = 0;
    succeed(torch_list_size(list.get(), &size));
    std::vector<T> out;
    out.reserve(size);
    for (size_t n = 0; n < size; ++n) {
      StableIValue item = 0;
      succeed(torch_list_get_item(list.get(), n, &item));
      out.push_back(Argument<T>::from(item));
    }
    return out;
  }
};

inline void hand_over(Tensor&& result, StableIValue* to) { *to = std::bit_cast<StableIValue>(result.release()); }

template <typename... T>
void hand_over(std::tuple<T...>&& results, StableIValue* to) {
  std::apply([&](auto&... each) { (hand_over(std::move(each), to++), ...); }, results);
}

template <auto kFunction>
struct Operator;

template <typename Result, typename... Arguments, Result (*kFunction)(Arguments...)>
struct Operator<kFunction> {
  // `stack` holds the arguments, and then the results.
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      const std::tuple<std::remove_cvref_t<Arguments>...> arguments{
          Argument<std::remove_cvref_t<Arguments>>::from(stack[I])...};
      hand_over(std::apply(kFunction, arguments), stack);
    }(std::index_sequence_for<Arguments...>());
  }
};

// Operators of a name space, for tensors on a CPU; they are there until the process ends.
class Library {
 public:
  explicit Library(const char* name) {
    succeed(aoti_torch_library_init_def(name, __FILE_NAME__, __LINE__, &schemas_));
    succeed(aoti_torch_library_init_impl(name, "CPU", __FILE_NAME__, __LINE__, &functions_));
  }

  // `schema` begins with the name.
  template <auto kFunction>
  void add(const std::string& schema) const {
    succeed(aoti_torch_library_def(schemas_, schema.c_str()));
    succeed(
        torch_library_impl(functions_, schema.substr(0, schema.find('(')).c_str(), Operator<kFunction>::call, kTorch));
  }

 private:
  TorchLibraryHandle schemas_ = nullptr, functions_ = nullptr;
};

}  // namespace structattn
