#include "machine.h"

#include <pthread.h>
#include <sys/mman.h>

#include <stdexcept>

#include <c10/util/Exception.h>

namespace simulated {

Knobs knobs;

void sleep_s(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Queue

void Queue::push(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  ++pushed_;
  changed_.notify_all();
}

void Queue::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t until = pushed_;
  changed_.wait(lock, [&] { return done_ >= until; });
}

bool Queue::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

void Queue::pause() {
  double most_s = knobs.delay_s;
  if (most_s <= 0) return;
  random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
  sleep_s(most_s * double(random_ >> 40) / double(1 << 24));
}

void Queue::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    pause();
    try {
      work();
    } catch (const std::exception& error) {
      Machine::get().remember(error.what());
    }
    work = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

// Memory

void* Memory::allocate(size_t nbytes, int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t size = (std::max<size_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  collect();
  void* found = take(size, stream);
  if (found == nullptr) {
    flush();
    found = take(size, stream);
  }
  if (found == nullptr) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", nbytes, " bytes. GPU ", device_,
        " has a total capacity of ", knobs.capacity_bytes.load(), " bytes of which ",
        knobs.capacity_bytes.load() - statistics_.reserved, " bytes is free.");
  }
  live_[(char*)found] = Block{size, stream, {}};
  statistics_.allocated += size;
  statistics_.num_allocations += 1;
  statistics_.peak_allocated = std::max(statistics_.peak_allocated, statistics_.allocated);
  return found;
}

// Returns a cached block of this stream, cut to size; else new memory, if the capacity allows it.
void* Memory::take(size_t size, int stream) {
  auto& cache = cached_[stream];
  auto fit = cache.lower_bound(size);
  if (fit != cache.end() && fit->first <= 2 * size + (size_t{1} << 20)) {
    char* address = fit->second;
    size_t rest = fit->first - size;
    cache.erase(fit);
    if (rest > 0) cache.emplace(rest, address + size);
    return address;
  }
  if (statistics_.reserved + (int64_t)size > knobs.capacity_bytes) return nullptr;
  char* address = nullptr;
  for (auto range = unused_.begin(); range != unused_.end(); ++range) {
    if (range->second < size) continue;
    address = range->first;
    size_t rest = range->second - size;
    unused_.erase(range);
    if (rest > 0) unused_[address + size] = rest;
    break;
  }
  if (address == nullptr) {
    if (size > size_t(end_ - next_)) return nullptr;
    address = next_;
    next_ += size;
  }
  statistics_.reserved += size;
  statistics_.peak_reserved = std::max(statistics_.peak_reserved, statistics_.reserved);
  return address;
}

void Memory::release(void* address) {
  if (Machine::is_child) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find((char*)address);
  if (found == live_.end()) return;
  Block block = found->second;
  live_.erase(found);
  statistics_.allocated -= block.nbytes;
  if (block.also_on.empty()) {
    give_to_cache((char*)address, block);
    return;
  }
  Pending pending{(char*)address, block, {}};
  for (int other : block.also_on) {
    auto event = std::make_shared<Event>();
    uint64_t version = event->record();
    Machine::get().stream(device_, other).push([event, version] { event->pass(version); });
    pending.events.emplace_back(event, version);
  }
  pending_.push_back(std::move(pending));
}

// Later operations on the block's own stream may use freed memory at once; that stream fills it with NaN before.
void Memory::give_to_cache(char* address, const Block& block) {
  if (knobs.poison) {
    char* bytes = Machine::get().host_address(address);
    size_t nbytes = block.nbytes;
    Machine::get().stream(device_, block.stream).push([bytes, nbytes] { std::memset(bytes, 0xFF, nbytes); });
  }
  cached_[block.stream].emplace(block.nbytes, address);
}

void Memory::collect() {
  std::vector<Pending> rest;
  for (auto& pending : pending_) {
    if (are_over(pending.events)) {
      give_to_cache(pending.address, pending.block);
    } else {
      rest.push_back(std::move(pending));
    }
  }
  pending_ = std::move(rest);
}

void Memory::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  flush();
}

// Waits for all streams of the device, as cudaFree does.
void Memory::flush() {
  Machine::get().synchronize(device_);
  collect();
  Machine::get().synchronize(device_);  // for the poison
  for (auto& [stream, blocks] : cached_) {
    for (auto& [size, address] : blocks) {
      statistics_.reserved -= size;
      unused_[address] = size;
    }
    blocks.clear();
  }
  for (auto range = unused_.begin(); range != unused_.end();) {
    auto next = std::next(range);
    if (next != unused_.end() && range->first + range->second == next->first) {
      range->second += next->second;
      unused_.erase(next);
    } else {
      range = next;
    }
  }
}

void Memory::used_on(void* address, int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find((char*)address);
  if (found != live_.end() && found->second.stream != stream) found->second.also_on.insert(stream);
}

Statistics Memory::statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

void Memory::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  statistics_.peak_allocated = statistics_.allocated;
  statistics_.peak_reserved = statistics_.reserved;
}

int64_t Memory::free_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return knobs.capacity_bytes - statistics_.reserved;
}

// Machine

std::atomic<bool> Machine::is_child{false};

Machine& Machine::get() {
  static Machine* machine = new Machine();
  return *machine;
}

Machine::Machine() {
  pthread_atfork(nullptr, nullptr, [] { is_child = true; });
  size_t nbytes = kMaxDevices * kDeviceBytes;
  void* base = mmap(nullptr, 2 * nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::runtime_error("simulated GPU: no address space");
  base_ = (char*)base;
  if (mprotect(base_ + nbytes, nbytes, PROT_READ | PROT_WRITE) != 0) throw std::runtime_error("simulated GPU: mprotect");
  for (int device = 0; device < kMaxDevices; ++device) {
    memories_[device] = std::make_unique<Memory>(device, base_ + device * kDeviceBytes);
    num_streams_[device] = 1;
  }
}

bool Machine::is_device_address(const void* address) const {
  return address >= base_ && address < base_ + kMaxDevices * kDeviceBytes;
}

int Machine::device_of(const void* address) const { return int(((const char*)address - base_) / kDeviceBytes); }

Queue& Machine::stream(int device, int number) {
  TORCH_CHECK(!is_child, "Cannot re-initialize CUDA in forked subprocess");
  std::lock_guard<std::mutex> lock(mutex_);
  auto& slot = streams_[device][number];
  if (!slot) slot = std::make_unique<Queue>(uint64_t(device) * kMaxStreams + number + 1);
  return *slot;
}

// Like torch's pool on CUDA: after the last stream, the first one is handed out again.
int Machine::new_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  int number = num_streams_[device]++;
  return 1 + (number - 1) % (kMaxStreams - 1);
}

void Machine::synchronize(int device) {
  for (int number = 0; number < kMaxStreams; ++number) {
    Queue* one;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      one = streams_[device][number].get();
    }
    if (one != nullptr) one->synchronize();
  }
}

Points Machine::everything() {
  Points points;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& streams : streams_) {
    for (auto& stream : streams) {
      if (!stream || stream->is_idle()) continue;
      auto event = std::make_shared<Event>();
      uint64_t version = event->record();
      stream->push([event, version] { event->pass(version); });
      points.emplace_back(event, version);
    }
  }
  return points;
}

void Machine::remember(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) error_ = error;
}

namespace {
void raise_and_forget(std::mutex& mutex, std::string& known) {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(mutex);
    std::swap(error, known);
  }
  TORCH_CHECK(error.empty(), "CUDA error: ", error);
}
}  // namespace

void Machine::raise_remembered() { raise_and_forget(mutex_, error_); }

void Machine::raise_refused() { raise_and_forget(mutex_, refused_); }

bool Machine::register_host(const void* address, size_t nbytes, bool is_refused) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = registered_.upper_bound((const char*)address);
  bool overlaps = next != registered_.end() && next->first < (const char*)address + nbytes;
  if (next != registered_.begin()) {
    auto before = std::prev(next);
    overlaps = overlaps || before->first + before->second > (const char*)address;
  }
  if (is_refused || overlaps) {
    refused_ = "the host memory could not be registered";
    return false;
  }
  registered_[(const char*)address] = nbytes;
  return true;
}

bool Machine::unregister_host(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  return registered_.erase((const char*)address) == 1;
}

bool Machine::is_registered(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = registered_.upper_bound((const char*)address);
  if (next == registered_.begin()) return false;
  auto before = std::prev(next);
  return (const char*)address < before->first + before->second;
}

}  // namespace simulated
