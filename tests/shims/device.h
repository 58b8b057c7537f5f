// The device behind the shims: memory that only API calls may touch, streams that are late at random, events, faults.
// Test code: nothing here is a vendor's, and nothing of it is shipped.
//
// Device memory is one file in memory, mapped twice. The addresses that are handed out allow no access, so that a
// host which touches them faults at once; the shim works through the second mapping, at a fixed distance. Fresh
// memory is 0xff bytes: NaN as a float, and no valid index as an integer.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

namespace shim {

inline long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

// Without the variable a shim is a library that finds no device.
inline bool allowed() {
  static const bool allowed = [] {
    const bool is_on = setting("ANYROLL_SHIM", 0) == 1;
    fprintf(stderr, is_on ? "SHIM: devices are simulated in host memory\n" : "SHIM: ANYROLL_SHIM=1 is not set: no device\n");
    return is_on;
  }();
  return allowed;
}
inline int devices() { return allowed() ? (int)setting("ANYROLL_SHIM_DEVICES", 4) : 0; }
inline size_t capacity() { return (size_t)setting("ANYROLL_SHIM_MEMORY_MIB", 8192) << 20; }

// ---- memory ----

class Memory {
 public:
  static constexpr size_t SPACE = 1ull << 38, ALIGN = 512, PAGE = 2 << 20;
  static constexpr size_t FILLED = 64 << 20;  // of a block, at most

  static Memory& get() {
    static Memory* memory = new Memory;  // outlives every thread
    return *memory;
  }
  // The address of the same byte that may be touched.
  template <typename T>
  T* host(T* device) const {
    return (T*)((char*)device + (alias_ - base_));
  }
  // Addresses without memory. Null when there are none left.
  void* reserve(size_t len, size_t align) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (len > SPACE || align > SPACE) return nullptr;
    len = round(len, ALIGN);
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      const auto [start, size] = *gap;
      const uintptr_t at = round(start, align);
      if (at + len > start + size) continue;
      gaps_.erase(gap);
      if (at > start) gaps_[start] = at - start;
      if (at + len < start + size) gaps_[at + len] = start + size - at - len;
      return (void*)at;
    }
    return nullptr;
  }
  void unreserve(void* at, size_t len) {
    std::lock_guard<std::mutex> lock(mutex_);
    uintptr_t start = (uintptr_t)at, end = start + round(len, ALIGN);
    auto next = gaps_.lower_bound(start);
    if (next != gaps_.end() && next->first == end) end += next->second, next = gaps_.erase(next);
    if (next != gaps_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += end - start;
        return;
      }
    }
    gaps_[start] = end - start;
  }
  // Takes memory from a device for `at`; false when it is full, or when the test wants it to be.
  bool commit(int device, void* at, size_t len) {
    static const long fails_at = setting("ANYROLL_SHIM_FAIL_ALLOC", 0);
    static std::atomic<long> count{0};
    if (fails_at && ++count == fails_at) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (used_[device] + len > capacity()) return false;
      used_[device] += len;
      live_[(uintptr_t)at] = {len, device};
    }
    fill(at, len);
    return true;
  }
  void uncommit(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find((uintptr_t)at);
    if (found == live_.end()) return;
    used_[found->second.device] -= found->second.len;
    const size_t len = found->second.len;
    if (len <= FILLED) {
      fill(at, len);  // pages are dear to make: they are kept, and whoever still reads them gets nothing of worth
    } else {
      const uintptr_t first = round((uintptr_t)at, 4096), last = ((uintptr_t)at + len) & ~4095ull;
      fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first - base_, last - first);
    }
    live_.erase(found);
  }
  // The length of a live block that starts here, or 0.
  size_t block(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find((uintptr_t)at);
    return found == live_.end() ? 0 : found->second.len;
  }
  // The device of a live block that starts here, or -1.
  int owner(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find((uintptr_t)at);
    return found == live_.end() ? -1 : found->second.device;
  }
  // Gives a block and its addresses back.
  void release(void* at) {
    const size_t len = block(at);
    uncommit(at);
    unreserve(at, len);
  }
  // Whether all of the range has memory of this device (any, for -1). A range may span neighbouring blocks.
  bool is_live(const void* at, size_t len, int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    uintptr_t from = (uintptr_t)at;
    const uintptr_t end = from + len;
    do {
      auto next = live_.upper_bound(from);
      if (next == live_.begin()) return false;
      auto [start, block] = *std::prev(next);
      if (from >= start + block.len || (device >= 0 && block.device != device)) return false;
      from = start + block.len;
    } while (from < end);
    return true;
  }
  size_t used(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_[device];
  }

 private:
  struct Block {
    size_t len;
    int device;
  };
  Memory() {
    file_ = memfd_create("shim", 0);
    const int flags = MAP_SHARED | MAP_NORESERVE;
    if (file_ < 0 || ftruncate(file_, SPACE)) abort();
    base_ = (uintptr_t)mmap(nullptr, SPACE, PROT_NONE, flags, file_, 0);
    alias_ = (uintptr_t)mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, flags, file_, 0);
    if (base_ == (uintptr_t)MAP_FAILED || alias_ == (uintptr_t)MAP_FAILED) abort();
    gaps_[base_] = SPACE;
  }
  void fill(void* at, size_t len) { memset(host((char*)at), 0xff, std::min(len, FILLED)); }
  static uintptr_t round(uintptr_t value, size_t to) { return (value + to - 1) / to * to; }

  int file_;
  uintptr_t base_, alias_;
  std::mutex mutex_;
  std::map<uintptr_t, size_t> gaps_;
  std::map<uintptr_t, Block> live_;
  std::map<int, size_t> used_;
};

// ---- events ----

// Counts records. A wait is for the last record before it, whatever is recorded behind that and reached earlier, on
// another stream say.
struct Event {
  std::mutex mutex;
  std::condition_variable reached;
  uint64_t recorded = 0;
  std::set<uint64_t> ahead;  // records that are not reached yet
  std::chrono::steady_clock::time_point at;

  uint64_t record() {
    std::lock_guard<std::mutex> lock(mutex);
    ahead.insert(++recorded);
    return recorded;
  }
  void finish(uint64_t version) {
    std::lock_guard<std::mutex> lock(mutex);
    ahead.erase(version);
    at = std::chrono::steady_clock::now();
    reached.notify_all();
  }
  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex);
    return recorded;
  }
  bool is_done(uint64_t version) {
    std::lock_guard<std::mutex> lock(mutex);
    return !ahead.count(version);
  }
  void wait(uint64_t version) {
    std::unique_lock<std::mutex> lock(mutex);
    reached.wait(lock, [&] { return !ahead.count(version); });
  }
};

// ---- streams ----

// A thread with a queue. `error` is the first failure of its work, in the vendor's code.
class Stream {
 public:
  explicit Stream(int device) : device(device), random_(setting("ANYROLL_SHIM_SEED", 0) + (uintptr_t)this) {
    std::thread([this] { run(); }).detach();
  }
  void enqueue(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    enqueued_++;
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t last = enqueued_;
    changed_.wait(lock, [&] { return finished_ >= last; });
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return finished_ == enqueued_;
  }
  // Its thread ends after its work, and the object with it.
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  void fail(int code) {
    int none = 0;
    error.compare_exchange_strong(none, code);
  }

  const int device;
  std::atomic<int> error{0};

 private:
  void run() {
    const long most_us = setting("ANYROLL_SHIM_DELAY_US", 0);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !queue_.empty() || ending_; });
      if (queue_.empty()) break;
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (most_us) std::this_thread::sleep_for(std::chrono::microseconds(random_() % most_us));
      work();
      work = nullptr;
      lock.lock();
      finished_++;
      changed_.notify_all();
    }
    lock.unlock();
    delete this;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t enqueued_ = 0, finished_ = 0;
  bool ending_ = false;
  std::minstd_rand random_;
};

// ---- handles ----

// The live objects of one kind: a handle that is not in here is an error, never a crash.
template <typename T>
class Handles {
 public:
  void* add(T value) {
    std::lock_guard<std::mutex> lock(mutex_);
    void* handle = (void*)(next_ += 16);
    live_[handle] = std::move(value);
    return handle;
  }
  T find(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find((void*)handle);
    return found == live_.end() ? T{} : found->second;
  }
  T remove(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find((void*)handle);
    if (found == live_.end()) return T{};
    T value = std::move(found->second);
    live_.erase(found);
    return value;
  }
  size_t count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_.size();
  }
  template <typename Visit>
  void each(Visit visit) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [handle, value] : live_) visit(value);
  }

 private:
  std::mutex mutex_;
  std::map<void*, T> live_;
  uintptr_t next_ = 0x1000;
};

// Ranges of host memory that are page-locked.
class Pinned {
 public:
  bool add(void* at, size_t len) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (overlaps((uintptr_t)at, len)) return false;
    ranges_[(uintptr_t)at] = len;
    return true;
  }
  bool remove(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ranges_.erase((uintptr_t)at) == 1;
  }
  // Whether the range lies in one registration.
  bool holds(const void* at, size_t len) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound((uintptr_t)at);
    if (next == ranges_.begin()) return false;
    auto [start, size] = *std::prev(next);
    return (uintptr_t)at + len <= start + size;
  }

 private:
  bool overlaps(uintptr_t at, size_t len) {
    auto next = ranges_.lower_bound(at + len);
    if (next == ranges_.begin()) return false;
    auto [start, size] = *std::prev(next);
    return start + size > at;
  }
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

}  // namespace shim
