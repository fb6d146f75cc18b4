// A C interface to the collectives of libtorch (c10d) for `c10d.rs`: a key-value store over TCP, and Gloo on tensors of the
// host. No exception leaves it: a function that fails returns null or false and sets `error`, which `elmo_c10d_free` frees.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using GlooPtr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The caller has a limit of its own: Gloo's cannot be extended while a call waits.
constexpr std::chrono::hours NEVER{24 * 365};

// Held while a call of Gloo begins. Each call is recorded by the flight recorder of the process, which inserts a new group into a
// map shared by all groups without holding its own lock (`recordWithResetEnabled` in FlightRecorderDetail.hpp). Without this lock,
// groups of one process race for that map.
std::mutex recording;

char* copied(const std::string& text) {
  return strdup(text.c_str());
}

template <typename F>
bool attempt(char** error, F&& call) noexcept {
  try {
    call();
    return true;
  } catch (const c10::Error& e) {
    *error = copied(e.what_without_backtrace());
  } catch (const std::exception& e) {
    *error = copied(e.what());
  } catch (...) {
    *error = copied("an unknown exception");
  }
  return false;
}

// Begins a call of Gloo.
template <typename F>
void* begun(char** error, F&& call) noexcept {
  WorkPtr* work = nullptr;
  attempt(error, [&] {
    std::lock_guard<std::mutex> one_at_a_time(recording);
    work = new WorkPtr(call());
  });
  return work;
}

// Copies a value, of at most `capacity` bytes.
void put(const std::vector<uint8_t>& value, const std::string& key, uint8_t* data, size_t capacity, size_t* n) {
  TORCH_CHECK(value.size() <= capacity, "the value of ", key, " has ", value.size(), " bytes, more than ", capacity);
  std::copy(value.begin(), value.end(), data);
  *n = value.size();
}

} // namespace

extern "C" {

void elmo_c10d_free(char* text) {
  free(text);
}

// `listener` is a socket that listens at the port, which the server takes over, or -1.
void* elmo_c10d_store(
    const char* host,
    uint16_t port,
    bool is_server,
    int listener,
    const char* prefix,
    int64_t timeout_ms,
    char** error) {
  StorePtr* store = nullptr;
  attempt(error, [&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server;
    options.waitWorkers = false;
    if (is_server && listener >= 0) {
      options.masterListenFd = listener;
    }
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto inner = c10::make_intrusive<c10d::TCPStore>(std::string(host), options);
    store = new StorePtr(c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), inner));
  });
  return store;
}

void elmo_c10d_store_drop(void* store) {
  delete static_cast<StorePtr*>(store);
}

bool elmo_c10d_store_set(void* store, const char* key, const uint8_t* data, size_t n, char** error) {
  return attempt(error, [&] { (*static_cast<StorePtr*>(store))->set(key, std::vector<uint8_t>(data, data + n)); });
}

// Waits for the key.
bool elmo_c10d_store_get(void* store, const char* key, uint8_t* data, size_t capacity, size_t* n, char** error) {
  return attempt(error, [&] { put((*static_cast<StorePtr*>(store))->get(key), key, data, capacity, n); });
}

// Does not wait for the key: `is_there` says whether it is there.
bool elmo_c10d_store_peek(
    void* store,
    const char* key,
    bool* is_there,
    uint8_t* data,
    size_t capacity,
    size_t* n,
    char** error) {
  return attempt(error, [&] {
    auto& opened = *static_cast<StorePtr*>(store);
    *is_there = opened->check({key});
    if (*is_there) {
      put(opened->get(key), key, data, capacity, n);
    }
  });
}

// Sets a key that is not there yet.
bool elmo_c10d_store_first(void* store, const char* key, const uint8_t* data, size_t n, char** error) {
  return attempt(error, [&] {
    (*static_cast<StorePtr*>(store))->compareSet(key, std::vector<uint8_t>(), std::vector<uint8_t>(data, data + n));
  });
}

// Adds to a number, which is 0 at first, and returns the sum.
bool elmo_c10d_store_add(void* store, const char* key, int64_t number, int64_t* sum, char** error) {
  return attempt(error, [&] { *sum = (*static_cast<StorePtr*>(store))->add(key, number); });
}

// `interface` names a network interface, or is empty: then `address` is that of this machine.
void* elmo_c10d_gloo(
    void* store,
    int rank,
    int size,
    const char* interface,
    const char* address,
    int64_t timeout_ms,
    char** error) {
  GlooPtr* group = nullptr;
  attempt(error, [&] {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::milliseconds(timeout_ms));
    options->devices.push_back(
        *interface ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                   : c10d::ProcessGroupGloo::createDeviceForHostname(address));
    options->threads = 1;
    auto connected =
        c10::make_intrusive<c10d::ProcessGroupGloo>(*static_cast<StorePtr*>(store), rank, size, options);
    connected->setTimeout(NEVER);
    group = new GlooPtr(std::move(connected));
  });
  return group;
}

// Must not be called while a call waits for other processes.
void elmo_c10d_gloo_drop(void* group) {
  delete static_cast<GlooPtr*>(group);
}

// Begins to sum a tensor over all processes, in place.
void* elmo_c10d_all_reduce(void* group, void* tensor, char** error) {
  return begun(error, [&] {
    std::vector<at::Tensor> tensors{*static_cast<at::Tensor*>(tensor)};
    return (*static_cast<GlooPtr*>(group))->allreduce(tensors);
  });
}

// Begins to write the tensors of all processes one after the other into `all`.
void* elmo_c10d_all_gather(void* group, void* own, void* all, char** error) {
  return begun(error, [&] {
    at::Tensor input = *static_cast<at::Tensor*>(own), output = *static_cast<at::Tensor*>(all);
    return (*static_cast<GlooPtr*>(group))->_allgather_base(output, input);
  });
}

// Begins to replace a tensor by that of process 0.
void* elmo_c10d_broadcast(void* group, void* tensor, char** error) {
  return begun(error, [&] {
    std::vector<at::Tensor> tensors{*static_cast<at::Tensor*>(tensor)};
    return (*static_cast<GlooPtr*>(group))->broadcast(tensors);
  });
}

void* elmo_c10d_barrier(void* group, char** error) {
  return begun(error, [&] { return (*static_cast<GlooPtr*>(group))->barrier(); });
}

// Waits for a call for some time, and says whether it has ended. An error is that of the call.
bool elmo_c10d_work_wait(void* work, int64_t timeout_ms, bool* has_ended, char** error) {
  return attempt(error, [&] {
    auto& begun = *static_cast<WorkPtr*>(work);
    try {
      begun->wait(std::chrono::milliseconds(timeout_ms));
      *has_ended = true;
    } catch (...) {
      // Either the time is over, or the call has failed, which the second wait says.
      *has_ended = begun->isCompleted();
      if (*has_ended) {
        begun->wait();
      }
    }
  });
}

void elmo_c10d_work_drop(void* work) {
  delete static_cast<WorkPtr*>(work);
}

} // extern "C"
