// The ranks of a communicator on one host: a socket between every two. A rank that is gone is not noticed, as in the
// vendors' libraries: whoever waits for it waits until the communicator is ended.
#pragma once
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace shim {

// A name that nobody else on this host has.
inline std::string random_name() {
  std::random_device random;
  return "anyroll-shim-" + std::to_string(getpid()) + "-" + std::to_string(((uint64_t)random() << 32) | random());
}

struct Transfer {
  int peer;
  void* data;  // of the host
  size_t len;
  bool is_send;
};

class Mesh {
 public:
  enum Outcome { DONE, ENDED, MISMATCH, LATE };

  std::atomic<bool> ended{false};
  std::chrono::seconds limit{1 << 30};  // of an exchange
  int rank = 0, size = 1;

  ~Mesh() {
    for (int peer : sockets_)
      if (peer >= 0) close(peer);
  }
  // Blocks until all are there, or it is ended.
  Outcome connect(const std::string& name, int rank_, int size_) {
    rank = rank_, size = size_;
    sockets_.assign(size, -1);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_un own = address(name, rank);
    if (bind(listener, (sockaddr*)&own, length(name, rank)) || listen(listener, size)) {
      close(listener);
      return MISMATCH;  // two ranks have one number
    }
    Outcome outcome = DONE;
    for (int peer = 0; peer < rank && outcome == DONE; peer++) outcome = dial(name, peer);
    for (int left = size - rank - 1; left > 0 && outcome == DONE; left--) outcome = answer(listener);
    close(listener);
    return outcome;
  }
  // All transfers at once. Between two ranks those of one direction match in order, and have to have one length.
  Outcome exchange(const std::vector<Transfer>& transfers) {
    const auto until = std::chrono::steady_clock::now() + limit;
    std::vector<Queue> queues(2 * size);
    for (const Transfer& t : transfers) {
      if (t.peer == rank) continue;
      queues[2 * t.peer + t.is_send].items.push_back({t.data, t.len, t.len});
    }
    for (;;) {
      std::vector<pollfd> waiting;
      std::vector<int> numbers;
      for (int i = 0; i < 2 * size; i++) {
        if (queues[i].is_done()) continue;
        waiting.push_back({sockets_[i / 2], (short)(i % 2 ? POLLOUT : POLLIN), 0});
        numbers.push_back(i);
      }
      if (waiting.empty()) return DONE;
      if (ended) return ENDED;
      if (std::chrono::steady_clock::now() > until) return LATE;
      poll(waiting.data(), waiting.size(), 10);
      bool is_gone = false;
      for (size_t i = 0; i < waiting.size(); i++) {
        if (!waiting[i].revents) continue;
        const int step = queues[numbers[i]].advance(sockets_[numbers[i] / 2], numbers[i] % 2);
        if (step == 3) return DONE;
        if (step == 2) return MISMATCH;
        is_gone |= step == 1;
      }
      if (is_gone) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  // Leaves what the others, in the next exchange that waits for this rank, take for all that they wait for.
  void run_out() {
    for (int peer : sockets_)
      if (peer >= 0) send(peer, &RAN_OUT, sizeof RAN_OUT, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

 private:
  static constexpr uint64_t RAN_OUT = UINT64_MAX;
  struct Item {
    void* data;
    uint64_t len, left;
  };
  // What goes one way between two ranks: for each item its length, then its bytes.
  struct Queue {
    std::vector<Item> items;
    size_t at = 0, header = 0;
    uint64_t announced = 0;

    bool is_done() const { return at == items.size(); }
    // 0 after progress, 1 when the other end is gone, 2 when the lengths differ, 3 when the other has run out.
    int advance(int socket, bool is_send) {
      while (!is_done()) {
        Item& item = items[at];
        const bool in_header = header < sizeof announced;
        if (in_header && is_send) announced = item.len;
        char* from = in_header ? (char*)&announced + header : (char*)item.data + (item.len - item.left);
        const size_t len = in_header ? sizeof announced - header : item.left;
        if (len) {
          const ssize_t moved = is_send ? send(socket, from, len, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(socket, from, len, MSG_DONTWAIT);
          if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
          if (moved <= 0) return 1;
          (in_header ? header += moved : item.left -= moved);
        }
        if (header == sizeof announced && announced != item.len) return announced == RAN_OUT ? 3 : 2;
        if (header == sizeof announced && !item.left) at++, header = 0;
      }
      return 0;
    }
  };

  static sockaddr_un address(const std::string& name, int rank) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = name + "." + std::to_string(rank);
    memcpy(address.sun_path + 1, path.data(), path.size());  // an abstract name: no file is left behind
    return address;
  }
  static socklen_t length(const std::string& name, int rank) {
    return offsetof(sockaddr_un, sun_path) + 1 + name.size() + 1 + std::to_string(rank).size();
  }
  Outcome dial(const std::string& name, int peer) {
    sockaddr_un other = address(name, peer);
    while (!ended) {
      const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(made, (sockaddr*)&other, length(name, peer)) == 0) {
        const int32_t number = rank;
        if (send(made, &number, sizeof number, MSG_NOSIGNAL) == sizeof number) {
          sockets_[peer] = made;
          return DONE;
        }
      }
      close(made);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return ENDED;
  }
  Outcome answer(int listener) {
    while (!ended) {
      pollfd waiting{listener, POLLIN, 0};
      poll(&waiting, 1, 10);
      const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (made < 0) continue;
      int32_t number = -1;
      if (recv(made, &number, sizeof number, MSG_WAITALL) != sizeof number || number <= rank || number >= size || sockets_[number] >= 0) {
        close(made);
        return MISMATCH;
      }
      sockets_[number] = made;
      return DONE;
    }
    return ENDED;
  }

  std::vector<int> sockets_;
};

}  // namespace shim
