// Torch's view of the machine: hooks, device guard, allocators, generators. Registered as CUDA.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "machine.h"
#include "device.h"

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

namespace {

thread_local DeviceIndex current_device = 0;
thread_local std::array<int, kMaxDevices> current_streams{};

Device cuda(DeviceIndex index) { return Device(c10::kCUDA, index); }

DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }

struct EventHandle {
  SharedEvent event = std::make_shared<Event>();
};

}  // namespace

DeviceIndex device_now() { return current_device; }

int stream_now(DeviceIndex device) { return current_streams[device < 0 ? current_device : device]; }

void set_device_now(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < knobs.num_devices, "CUDA error: invalid device ordinal ", int(device));
  current_device = device;
}

void push(std::function<void()> work) { Machine::get().stream(current_device, stream_now(-1)).push(std::move(work)); }

void block_host(const char* why) {
  if (knobs.sync_mode == 2) TORCH_CHECK(false, "called a synchronizing CUDA operation: ", why);
  ++knobs.num_syncs;
  if (knobs.sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", why);
  Machine::get().stream(current_device, stream_now(-1)).synchronize();
  Machine::get().raise_remembered();
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return cuda(current_device); }
  void setDevice(Device device) const override { set_device_now(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(knobs.num_devices.load()); }

  Stream getStream(Device device) const override {
    DeviceIndex index = index_of(device);
    return Stream(Stream::UNSAFE, cuda(index), StreamId(current_streams[index]));
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, cuda(index_of(device)), 0); }
  Stream getNewStream(Device device, int) const override {
    DeviceIndex index = index_of(device);
    return Stream(Stream::UNSAFE, cuda(index), StreamId(Machine::get().new_stream(index)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = int(stream.id());
    return before;
  }
  bool queryStream(const Stream& stream) const override { return of(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override {
    of(stream).synchronize();
    Machine::get().raise_remembered();
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Machine::get().synchronize(device < 0 ? current_device : device);
    Machine::get().raise_remembered();
  }
  void* getStreamNativeHandle(const Stream stream) const override { return (void*)(intptr_t)stream.id(); }

  void record(void** handle, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*handle == nullptr) *handle = new EventHandle();
    SharedEvent event = ((EventHandle*)*handle)->event;
    uint64_t version = event->record();
    of(stream).push([event, version] { event->pass(version); });
  }
  void block(void* handle, const Stream& stream) const override {
    if (handle == nullptr) return;
    SharedEvent event = ((EventHandle*)handle)->event;
    uint64_t version = event->latest();
    if (version > 0) of(stream).push([event, version] { event->wait(version); });
  }
  bool queryEvent(void* handle) const override { return handle == nullptr || ((EventHandle*)handle)->event->is_over(); }
  void synchronizeEvent(void* handle) const override {
    if (handle == nullptr) return;
    SharedEvent event = ((EventHandle*)handle)->event;
    event->wait(event->latest());
    Machine::get().raise_remembered();
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto a = ((EventHandle*)first)->event, b = ((EventHandle*)second)->event;
    TORCH_CHECK(a->is_over() && b->is_over(), "CUDA error: an event is not over yet");
    return std::chrono::duration<double, std::milli>(b->at - a->at).count();
  }
  void destroyEvent(void* handle, DeviceIndex) const noexcept override { delete (EventHandle*)handle; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (data.get() != nullptr) Machine::get().memory(stream.device_index()).used_on(data.get_context(), int(stream.id()));
  }

 private:
  static Queue& of(const Stream& stream) {
    return Machine::get().stream(stream.device_index(), int(stream.id()));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, cuda(current_device)};
    void* address = Machine::get().memory(current_device).allocate(nbytes, stream_now(-1));
    return {address, address, &release, cuda(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    char *to = Machine::get().host_address(target), *from = Machine::get().host_address(source);
    push([to, from, nbytes] { std::memcpy(to, from, nbytes); });
  }
  static void release(void* address) {
    if (address != nullptr) Machine::get().memory(Machine::get().device_of(address)).release(address);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator);

// Memory is freed only when no stream can use it any more. Nothing waits for that: later calls check.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    collect();
    void* address = std::aligned_alloc(4096, (std::max<size_t>(nbytes, 1) + 4095) / 4096 * 4096);
    Machine::get().register_host(address, std::max<size_t>(nbytes, 1));
    return {address, address, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }
  static void release(void* address) {
    if (Machine::is_child) return;
    Points points = Machine::get().everything();
    {
      std::lock_guard<std::mutex> lock(mutex);
      freed.emplace_back(address, std::move(points));
    }
    collect();
  }
  static void collect() {
    std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(freed, [](auto& one) {
      if (!are_over(one.second)) return false;
      Machine::get().unregister_host(one.first);
      std::free(one.first);
      return true;
    });
  }

  static std::mutex mutex;
  static std::vector<std::pair<void*, Points>> freed;
};

std::mutex PinnedAllocator::mutex;
std::vector<std::pair<void*, Points>> PinnedAllocator::freed;
PinnedAllocator pinned_allocator;

// Draws a seed per launch, like Philox with its offsets: the host never waits for the device.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device) : c10::GeneratorImpl(cuda(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(uint64_t(Clock::now().time_since_epoch().count()));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    auto values = (const uint64_t*)state.data();
    seed_ = values[0], offset_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto values = (uint64_t*)state.data_ptr();
    values[0] = seed_, values[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t draw() {
    uint64_t x = seed_ + 0x9E3779B97F4A7C15ull * ++offset_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

 private:
  uint64_t seed_ = 0, offset_ = 0;
};

at::Generator default_generators[kMaxDevices];

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return knobs.num_devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(knobs.num_devices.load()); }
  int getNumGPUs() const override { return knobs.num_devices; }
  DeviceIndex current_device() const override { return simulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { set_device_now(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = simulated::current_device;
    set_device_now(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return Machine::get().is_registered(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void* data) const override { return cuda(DeviceIndex(Machine::get().device_of(data))); }
  void deviceSynchronize(DeviceIndex device) const override { Machine::get().synchronize(device); }
  std::string showConfig() const override { return "simulated GPU"; }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    auto& found = default_generators[device < 0 ? simulated::current_device : device];
    if (!found.defined()) found = at::make_generator<Generator>(device < 0 ? simulated::current_device : device);
    return found;
  }
  // The first generator of a device is its default, so that Python can have an object for it.
  at::Generator getNewGenerator(DeviceIndex device) const override {
    DeviceIndex index = device < 0 ? simulated::current_device : device;
    if (!default_generators[index].defined()) return getDefaultGenerator(index);
    return at::make_generator<Generator>(index);
  }
};

}  // namespace

uint64_t draw_seed(const std::optional<at::Generator>& given) {
  at::Generator generator =
      given.has_value() && given->defined() ? *given : at::detail::getCUDAHooks().getDefaultGenerator(-1);
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "Expected a 'cuda' device type for generator but found 'cpu'");
  return own->draw();
}

c10::Allocator* allocator() { return &device_allocator; }

}  // namespace simulated

// The registry looks a class up by its name in this namespace.
namespace at {
using CUDAHooks = simulated::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
