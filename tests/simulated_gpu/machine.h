// The simulated machine: device memory, streams that are threads, events, faults and speeds. It knows no tensors.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace simulated {

constexpr int kMaxDevices = 4;
constexpr int kMaxStreams = 256;  // per device; number 0 is the default stream
constexpr size_t kDeviceBytes = size_t{1} << 36;
constexpr size_t kAlignment = 512;  // of device memory, as on CUDA

using Clock = std::chrono::steady_clock;

// A point on a stream. `version` counts records, so that a wait refers to the record before it.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;  // on the host
  uint64_t passed = 0;    // by the stream
  Clock::time_point at;

  uint64_t record() {
    std::lock_guard<std::mutex> lock(mutex);
    return ++recorded;
  }
  void pass(uint64_t version) {
    std::lock_guard<std::mutex> lock(mutex);
    passed = std::max(passed, version);
    at = Clock::now();
    changed.notify_all();
  }
  void wait(uint64_t version) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed >= version; });
  }
  bool is_over() {
    std::lock_guard<std::mutex> lock(mutex);
    return passed >= recorded;
  }
  uint64_t latest() {
    std::lock_guard<std::mutex> lock(mutex);
    return recorded;
  }
};

using SharedEvent = std::shared_ptr<Event>;
using Points = std::vector<std::pair<SharedEvent, uint64_t>>;

inline bool are_over(const Points& points) {
  bool result = true;
  for (auto& [event, version] : points) result = result && event->is_over();
  return result;
}

// Where copies of one direction stand still on demand.
class Gate {
 public:
  // The next copy that comes opens the gate after so many seconds; 0 opens it now.
  void close(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    seconds_ = seconds;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (seconds_ <= 0) return;
    changed_.wait_for(lock, std::chrono::duration<double>(seconds_), [&] { return seconds_ <= 0; });
    seconds_ = 0;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  double seconds_ = 0;
};

// Settings that Python may change, and counters that it may read. All devices share them.
struct Knobs {
  std::atomic<int> num_devices{1};
  std::atomic<int64_t> capacity_bytes{int64_t{8} << 30};
  std::atomic<bool> poison{true};
  std::atomic<int> sync_mode{0};             // 0: go on, 1: warn, 2: raise at an operation that blocks the host
  std::atomic<int> refuse_registration{0};   // how many host registrations are refused
  std::atomic<double> h2d_bytes_per_s{0};    // 0: as fast as memory is
  std::atomic<double> d2h_bytes_per_s{0};
  std::atomic<double> compute_bytes_per_s{0};
  Gate h2d_gate;
  Gate d2h_gate;
  std::atomic<double> delay_s{0};            // longest random delay before each operation of a stream
  std::atomic<int64_t> fail_at{-1};          // the operation with this number fails on the device
  std::atomic<int64_t> num_operations{0};
  std::atomic<int64_t> num_syncs{0};
};

extern Knobs knobs;

// A thread that runs the work that it is given in order.
class Queue {
 public:
  explicit Queue(uint64_t seed) : random_(seed * 2654435761u + 1), thread_([this] { run(); }) { thread_.detach(); }

  void push(std::function<void()> work);
  void synchronize();
  bool is_idle();

 private:
  void run();
  void pause();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t pushed_ = 0, done_ = 0;
  uint64_t random_;
  std::thread thread_;
};

struct Statistics {
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0, num_allocations = 0;
};

// Device memory: addresses that the host cannot touch, with bytes elsewhere, and freed blocks cached per stream.
class Memory {
 public:
  Memory(int device, char* base) : device_(device), next_(base), end_(base + kDeviceBytes) {}

  void* allocate(size_t nbytes, int stream);
  void release(void* address);
  void used_on(void* address, int stream);
  void empty_cache();
  Statistics statistics();
  void reset_peaks();
  int64_t free_bytes();

 private:
  struct Block {
    size_t nbytes;
    int stream;
    std::set<int> also_on;
  };
  struct Pending {  // freed, but still in use on other streams
    char* address;
    Block block;
    Points events;
  };

  void* take(size_t nbytes, int stream);
  void collect();
  void flush();
  void give_to_cache(char* address, const Block& block);

  std::mutex mutex_;
  int device_;
  char* next_;
  char* end_;
  std::map<char*, size_t> unused_;                        // given back by empty_cache, coalesced
  std::map<int, std::multimap<size_t, char*>> cached_;    // stream -> size -> address
  std::unordered_map<char*, Block> live_;
  std::vector<Pending> pending_;
  Statistics statistics_;
};

// The whole machine, made once and never destroyed: its threads run to the end of the process.
class Machine {
 public:
  static Machine& get();
  static std::atomic<bool> is_child;  // in a fork, which has no streams: it may release memory, and nothing else

  char* host_address(const void* device_address) const { return (char*)device_address + kMaxDevices * kDeviceBytes; }
  bool is_device_address(const void* address) const;
  int device_of(const void* address) const;

  Queue& stream(int device, int number);
  int new_stream(int device);
  Memory& memory(int device) { return *memories_[device]; }
  void synchronize(int device);
  Points everything();  // points behind all work that any stream has so far

  void remember(const std::string& error);  // an error on a stream, raised at the next synchronisation
  void raise_remembered();
  void raise_refused();  // raises a refusal of the runtime, at the next launch of any caller

  bool register_host(const void* address, size_t nbytes, bool is_refused = false);
  bool unregister_host(const void* address);
  bool is_registered(const void* address);

 private:
  Machine();

  char* base_;
  std::mutex mutex_;
  std::array<std::array<std::unique_ptr<Queue>, kMaxStreams>, kMaxDevices> streams_;
  std::array<int, kMaxDevices> num_streams_{};
  std::array<std::unique_ptr<Memory>, kMaxDevices> memories_;
  std::map<const char*, size_t> registered_;
  std::string error_, refused_;
};

void sleep_s(double seconds);

}  // namespace simulated
