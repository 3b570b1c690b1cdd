// Every operator: shapes are computed at once, the CPU's kernel runs later on the current stream, over the device's
// bytes. Where the shape depends on values, or a value is asked for, the host waits, which is counted.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <torch/library.h>

#include <set>

#include "device.h"
#include "machine.h"

namespace simulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet kBelowAutograd = c10::autograd_dispatch_keyset_with_ADInplaceOrView;

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

int64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? int64_t(tensor.nbytes()) : 0; }

// Returns the same bytes as a CPU tensor. It holds no reference: the device does not keep memory alive either.
at::Tensor device_bytes(const at::Tensor& tensor) {
  void* base = tensor.storage().mutable_data();
  void* bytes = base == nullptr ? nullptr : Machine::get().host_address(base);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), at::DataPtr(bytes, c10::kCPU), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (tensor.device().is_cpu() && tensor.dim() == 0) return tensor;
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

using Convert = std::function<at::Tensor(const at::Tensor&)>;

IValue converted(const IValue& value, const Convert& convert) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(convert(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) made.push_back(each.defined() ? convert(each) : each);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& each : value.toOptionalTensorList()) {
      std::optional<at::Tensor> one = each;
      made.push_back(one.has_value() && one->defined() ? std::optional<at::Tensor>(convert(*one)) : one);
    }
    return made;
  }
  return value;
}

void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  converted(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

Stack with(const Stack& arguments, const Convert& convert, std::optional<c10::Device> device = std::nullopt) {
  Stack made;
  made.reserve(arguments.size());
  for (const IValue& value : arguments) {
    made.push_back(device && value.isDevice() ? IValue(*device) : converted(value, convert));
  }
  return made;
}

at::Tensor empty_like_geometry(const at::Tensor& geometry) {
  return at::Tensor(at::detail::empty_strided_generic(
      geometry.sizes(), geometry.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      geometry.scalar_type()));
}

// Returns how long the operation takes at least, at the rate that was set.
double least_s(int64_t nbytes, const std::atomic<double>& bytes_per_s) {
  double rate = bytes_per_s;
  return rate > 0 ? double(nbytes) / rate : 0;
}

void timed(double seconds, const std::function<void()>& work) {
  auto start = Clock::now();
  work();
  if (seconds > 0) sleep_s(seconds - std::chrono::duration<double>(Clock::now() - start).count());
}

void launch(std::string name, double seconds, std::function<void()> work) {
  Machine::get().raise_refused();
  int64_t number = knobs.num_operations++;
  push([number, seconds, name = std::move(name), work = std::move(work)] {
    if (number == knobs.fail_at) TORCH_CHECK(false, "an injected failure in ", name);
    try {
      timed(seconds, work);
    } catch (const c10::Error& error) {
      throw std::runtime_error(name + ": " + error.what_without_backtrace());
    }
  });
}

// Gives random operators a CPU generator with a seed drawn at launch.
void seed_generators(const c10::FunctionSchema& schema, Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& type = schema.arguments()[i].type();
    bool wants = type->str().find("Generator") != std::string::npos;
    if (!wants) continue;
    std::optional<at::Generator> given;
    if (arguments[i].isGenerator()) given = arguments[i].toGenerator();
    arguments[i] = at::detail::createCPUGenerator(draw_seed(given));
  }
}

// Returns the argument that a result stands for, by the alias sets of the schema.
const IValue* aliased_argument(const c10::FunctionSchema& schema, size_t index, const Stack& arguments) {
  const auto* of_return = schema.returns()[index].alias_info();
  if (of_return == nullptr) return nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* of_argument = schema.arguments()[i].alias_info();
    if (of_argument == nullptr) continue;
    for (const auto& symbol : of_argument->beforeSets()) {
      if (of_return->beforeSets().count(symbol)) return &arguments[i];
    }
  }
  return nullptr;
}

void resize_to(const at::Tensor& tensor, const at::Tensor& geometry) {
  if (tensor.sizes() == geometry.sizes()) return;
  at::Tensor fresh = empty_like_geometry(geometry);
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides(), 0);
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  Stack arguments;
  std::string name;

  bool writes() const {
    for (const auto& argument : schema.arguments()) {
      if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return true;
    }
    return false;
  }
  bool is_view() const {
    for (const auto& result : schema.returns()) {
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
    }
    return false;
  }
};

Stack run_on_cpu(const c10::OperatorHandle& op, Stack arguments) {
  c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
  if (op.schema().name() == "aten::histc" && at::isIntegralType(arguments[0].toTensor().scalar_type(), false)) {
    arguments[0] = arguments[0].toTensor().to(at::kFloat);  // the CPU has no kernel for integers
  }
  op.callBoxed(&arguments);
  return arguments;
}

// Arguments of a launched kernel: the device's bytes, and copies of tensors in host memory (0-dim scalars, indices).
Stack launch_arguments(const Call& call) {
  Stack made = with(
      call.arguments, [](const at::Tensor& t) { return is_on_device(t) ? device_bytes(t) : t.device().is_cpu() ? t.clone() : t; },
      c10::Device(c10::kCPU));
  seed_generators(call.schema, made);
  return made;
}

// A GPU's kernel converts a 0-dim operand on the device to the dtype of the other one; the CPU's multiplies and adds by
// it as it is. Returns that dtype, if it differs.
std::optional<at::ScalarType> dtype_of_number(const Call& call) {
  static const std::set<std::string> names = {
      "aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::add", "aten::add_", "aten::sub", "aten::sub_"};
  if (names.count(call.name) == 0 || !call.arguments[0].isTensor() || !call.arguments[1].isTensor()) return std::nullopt;
  at::Tensor first = call.arguments[0].toTensor(), number = call.arguments[1].toTensor();
  bool is_rounded = at::isReducedFloatingType(first.scalar_type()) && first.dim() > 0 && number.dim() == 0 &&
      is_on_device(number) && !number.is_complex() && number.scalar_type() != first.scalar_type();
  return is_rounded ? std::optional<at::ScalarType>(first.scalar_type()) : std::nullopt;
}

// Runs a call at its turn on the stream, when the bytes are there.
Stack run_at_turn(const c10::OperatorHandle& op, Stack arguments, std::optional<at::ScalarType> number) {
  if (number) {
    c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
    arguments[1] = arguments[1].toTensor().to(*number);
  }
  return run_on_cpu(op, std::move(arguments));
}

double compute_s(const Call& call) {
  int64_t nbytes = 0;
  for (const IValue& value : call.arguments) for_each_tensor(value, [&](const at::Tensor& t) { nbytes += bytes_of(t); });
  return least_s(nbytes, knobs.compute_bytes_per_s);
}

// A norm's statistics have the dtype of its weight on the CPU, and fp32 in the meta kernel.
std::optional<at::ScalarType> dtype_of_statistics(const Call& call) {
  bool is_of_layer = call.name == "aten::native_layer_norm";
  if (!is_of_layer && call.name != "aten::native_group_norm" && call.name != "aten::native_batch_norm") return std::nullopt;
  at::Tensor weight = call.arguments[is_of_layer ? 2 : 1].toTensor();
  return (weight.defined() ? weight : call.arguments[0].toTensor()).scalar_type();
}

std::optional<Stack> meta_results(const Call& call) {
  Stack made = with(call.arguments, as_meta, c10::Device(c10::kMeta));
  for (IValue& value : made) {
    if (value.isGenerator()) value = IValue();
  }
  try {
    c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
    call.op.callBoxed(&made);
    return made;
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const c10::Error& error) {
    if (std::string(error.what_without_backtrace()).find("meta") != std::string::npos) return std::nullopt;
    throw;
  }
}

// Makes a result that shares its argument's memory: the CPU computes the geometry, without touching a byte.
void view(Call& call, Stack* stack) {
  Stack results = run_on_cpu(call.op, with(call.arguments, [](const at::Tensor& t) { return is_on_device(t) ? device_bytes(t) : t; }));
  for (size_t i = 0; i < results.size(); ++i) {
    const IValue* source = aliased_argument(call.schema, i, call.arguments);
    TORCH_CHECK(source != nullptr && source->isTensor(), "simulated GPU: a view of what? ", call.name);
    at::Tensor base = source->toTensor();
    stack->push_back(converted(results[i], [&](const at::Tensor& t) {
      at::Tensor made = at::native::as_strided_tensorimpl(base, t.sizes(), t.strides(), t.storage_offset());
      if (t.dtype() != made.dtype()) {
        auto other = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
        other.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
        return at::Tensor(other);
      }
      return made;
    }));
  }
}

// Gives `out` arguments the shape that the meta kernel computes; returns false if it cannot.
bool resize_outputs(const Call& call) {
  Stack metas = with(call.arguments, as_meta, c10::Device(c10::kMeta));
  try {
    c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
    Stack copy = metas;
    call.op.callBoxed(&copy);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (call.schema.arguments()[i].is_out() && call.arguments[i].isTensor()) {
      resize_to(call.arguments[i].toTensor(), metas[i].toTensor());
    }
  }
  return true;
}

// Writes into `out`, whose shape only the CPU's kernel knows: the host waits.
void wait_and_fill(Call& call, Stack* stack) {
  block_host(call.name.c_str());
  Stack arguments = launch_arguments(call);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (call.schema.arguments()[i].is_out()) arguments[i] = at::empty({0}, call.arguments[i].toTensor().options().device(at::kCPU));
  }
  run_on_cpu(call.op, arguments);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!call.schema.arguments()[i].is_out()) continue;
    at::Tensor made = arguments[i].toTensor(), out = call.arguments[i].toTensor();
    resize_to(out, made);
    at::Tensor target = device_bytes(out);
    launch(call.name, 0, [target, made]() mutable {
      c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
      target.copy_(made);
    });
    stack->push_back(out);
  }
}

// Runs in place or into `out`: nothing is allocated, unless `out` has another shape.
void mutate(Call& call, Stack* stack) {
  bool has_out = call.schema.is_mutable() && call.schema.arguments().back().is_out();
  if (has_out && !resize_outputs(call)) return wait_and_fill(call, stack);
  launch(call.name, compute_s(call), [op = call.op, arguments = launch_arguments(call), number = dtype_of_number(call)] {
    run_at_turn(op, arguments, number);
  });
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    const IValue* source = aliased_argument(call.schema, i, call.arguments);
    TORCH_CHECK(source != nullptr, "simulated GPU: no argument for a result of ", call.name);
    stack->push_back(*source);
  }
}

// Returns the tensors of results in order, with the undefined ones.
std::vector<at::Tensor> tensors_of(const Stack& results) {
  std::vector<at::Tensor> found;
  for (const IValue& value : results) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& each : value.toTensorVector()) found.push_back(each);
  }
  return found;
}

// Makes results whose shape the meta kernel knows: allocated now, filled later.
void compute(Call& call, Stack results, Stack* stack) {
  auto dtype = dtype_of_statistics(call);
  Stack made;
  for (const IValue& result : results) {
    bool is_statistic = dtype.has_value() && !made.empty();
    made.push_back(converted(
        result, [&](const at::Tensor& geometry) { return empty_like_geometry(is_statistic ? geometry.to(*dtype) : geometry); }));
  }
  std::vector<at::Tensor> targets;
  for (const at::Tensor& each : tensors_of(made)) targets.push_back(each.defined() ? device_bytes(each) : each);
  for (IValue& value : made) stack->push_back(value);
  auto number = dtype_of_number(call);
  launch(call.name, compute_s(call), [op = call.op, arguments = launch_arguments(call), number, targets = std::move(targets)] {
    std::vector<at::Tensor> sources = tensors_of(run_at_turn(op, arguments, number));
    for (size_t i = 0; i < targets.size(); ++i) {
      at::Tensor target = targets[i], source = sources[i];
      // One of the two leaves out results that are not needed: gradients by their mask, unused statistics.
      if (!target.defined() || !source.defined() || source.numel() == 0) continue;
      c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
      target.copy_(source);
    }
  });
}

// The shape depends on values, or a value is the result: the host waits.
void wait_and_compute(Call& call, Stack* stack) {
  block_host(call.name.c_str());
  Stack results = run_on_cpu(call.op, launch_arguments(call));
  for (const IValue& result : results) {
    stack->push_back(converted(result, [&](const at::Tensor& source) {
      at::Tensor made = empty_like_geometry(source);
      at::Tensor target = device_bytes(made);
      launch(call.name, 0, [target, source]() mutable {
        c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
        target.copy_(source);
      });
      return made;
    }));
  }
}

std::optional<c10::Device> device_of(const Stack& arguments) {
  std::optional<c10::Device> found;
  for (const IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& t) {
      if (!found && is_on_device(t)) found = t.device();
    });
  }
  return found;
}

// Like CUDA's kernels. 0-dim tensors of the host count as numbers, except those that a fused optimizer writes.
void refuse_mixed_devices(const Call& call) {
  static const std::set<std::string> may_be_mixed = {
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index",
      "aten::_unsafe_index_put", "aten::_foreach_copy_", "aten::_pack_padded_sequence", "aten::_to_copy"};
  if (may_be_mixed.count(call.name)) return;
  bool is_optimizer = call.name.rfind("aten::_fused_ad", 0) == 0 || call.name.rfind("aten::_fused_sgd", 0) == 0;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const std::string& name = call.schema.arguments()[i].name();
    for_each_tensor(call.arguments[i], [&](const at::Tensor& t) {
      bool is_number = t.dim() == 0 && !(is_optimizer && name != "lr");
      TORCH_CHECK(
          !t.device().is_cpu() || is_number, "Expected all tensors to be on the same device, but got ", name,
          " is on cpu, different from other tensors on cuda (simulated, in ", call.name, ")");
    });
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  Call call{op, schema, Stack(stack->end() - count, stack->end()), schema.name()};
  torch::jit::drop(*stack, count);
  c10::OptionalDeviceGuard guard(device_of(call.arguments));
  if (call.is_view()) return view(call, stack);
  refuse_mixed_devices(call);
  if (call.writes()) return mutate(call, stack);
  bool gives_tensors = !schema.returns().empty();
  for (const auto& result : schema.returns()) {
    gives_tensors = gives_tensors && result.type()->str().find("Tensor") != std::string::npos;
  }
  if (gives_tensors) {
    if (auto results = meta_results(call)) return compute(call, std::move(*results), stack);
  }
  wait_and_compute(call, stack);
}

// Operators that the fallback cannot know.

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format));
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(c10::get_default_dtype_as_scalartype())));
}

bool is_pinned(const at::Tensor& tensor) { return tensor.device().is_cpu() && Machine::get().is_registered(tensor.data_ptr()); }

// Returns the same memory as a tensor that keeps nothing alive, like registered memory to the driver.
at::Tensor unowned(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options());
}

void copy_later(const char* what, at::Tensor target, at::Tensor source, double seconds, Gate* gate = nullptr) {
  launch(what, seconds, [target, source, gate]() mutable {
    if (gate != nullptr) gate->pass();
    c10::impl::ExcludeDispatchKeyGuard guard(kBelowAutograd);
    target.copy_(source);
  });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (self.numel() == 0) return self;
  c10::OptionalDeviceGuard guard(is_on_device(self) ? self.device() : from.device());
  if (is_on_device(self) && is_on_device(from)) {
    copy_later("copy on the device", device_bytes(self), device_bytes(from), least_s(bytes_of(self), knobs.compute_bytes_per_s));
  } else if (is_on_device(self)) {
    bool is_direct = non_blocking && is_pinned(from);
    at::Tensor read = is_direct ? unowned(from) : from.clone();  // pageable memory is staged
    copy_later("copy to the device", device_bytes(self), read, least_s(bytes_of(from), knobs.h2d_bytes_per_s), &knobs.h2d_gate);
    if (!non_blocking) block_host("a blocking copy to the device");
  } else {
    copy_later("copy from the device", unowned(self), device_bytes(from), least_s(bytes_of(from), knobs.d2h_bytes_per_s), &knobs.d2h_gate);
    if (!non_blocking || !is_pinned(self)) block_host("a blocking copy from the device");
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  copy_(to, self, non_blocking);
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  block_host("item");
  return device_bytes(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Machine::get().memory(self.device().index()).used_on(self.storage().data_ptr().get_context(), int(stream.id()));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  size_t needed = (self.storage_offset() + c10::multiply_integers(sizes)) * self.dtype().itemsize();
  if (needed > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    c10::DataPtr fresh = allocator()->allocate(needed);
    size_t known = self.storage().nbytes();
    if (known > 0) {
      char *to = Machine::get().host_address(fresh.get()), *from = Machine::get().host_address(self.storage().data());
      push([to, from, known] { std::memcpy(to, from, known); });
    }
    self.storage().set_data_ptr_noswap(std::move(fresh));
    self.storage().set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || (train.has_value() && !*train)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  double scale = p == 1 ? 0 : 1 / (1 - p);
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// A product of half-precision tensors that is accumulated in fp32: only CUDA has it.
at::Tensor& addmm_in(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
    const at::Scalar& alpha, at::Tensor& out) {
  return at::addmm_out(out, self, a.to(dtype), b.to(dtype), beta, alpha);
}

int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // the plain implementation
}

}  // namespace
}  // namespace simulated

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &simulated::choose_attention)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", simulated::empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("copy_", simulated::copy_);
  m.impl("_copy_from", simulated::copy_from);
  m.impl("_local_scalar_dense", simulated::local_scalar);
  m.impl("record_stream", simulated::record_stream);
  m.impl("resize_", simulated::resize_);
  m.impl("native_dropout", simulated::native_dropout);
  m.impl("addmm.dtype_out", simulated::addmm_in);
  // Else torch composes it of others, whose statistics the CPU's backward refuses.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>());
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}
