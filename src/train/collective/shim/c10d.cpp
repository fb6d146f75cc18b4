// A C interface to the collectives of libtorch (c10d) for `c10d.rs`: a key-value store over TCP, and Gloo on tensors of the
// host. No exception leaves it: a function that fails returns null or false and sets `error`, which `elmo_c10d_free` frees.

#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using GlooPtr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

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

template <typename Work>
void finish(const Work& work) {
  work->wait();
}

} // namespace

extern "C" {

void elmo_c10d_free(char* text) {
  free(text);
}

void* elmo_c10d_store(
    const char* host,
    uint16_t port,
    bool is_server,
    const char* prefix,
    int64_t timeout_ms,
    char** error) {
  StorePtr* store = nullptr;
  attempt(error, [&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server;
    options.waitWorkers = false;
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

// Waits for the key. The value must have `n` bytes.
bool elmo_c10d_store_get(void* store, const char* key, uint8_t* data, size_t n, char** error) {
  return attempt(error, [&] {
    const auto value = (*static_cast<StorePtr*>(store))->get(key);
    TORCH_CHECK(value.size() == n, "the value of ", key, " has ", value.size(), " bytes, not ", n);
    std::memcpy(data, value.data(), n);
  });
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
    group = new GlooPtr(
        c10::make_intrusive<c10d::ProcessGroupGloo>(*static_cast<StorePtr*>(store), rank, size, options));
  });
  return group;
}

void elmo_c10d_gloo_drop(void* group) {
  delete static_cast<GlooPtr*>(group);
}

// Sums a tensor over all processes, in place.
bool elmo_c10d_all_reduce(void* group, void* tensor, char** error) {
  return attempt(error, [&] {
    std::vector<at::Tensor> tensors{*static_cast<at::Tensor*>(tensor)};
    finish((*static_cast<GlooPtr*>(group))->allreduce(tensors));
  });
}

// Writes the tensors of all processes one after the other into `all`.
bool elmo_c10d_all_gather(void* group, void* own, void* all, char** error) {
  return attempt(error, [&] {
    at::Tensor input = *static_cast<at::Tensor*>(own), output = *static_cast<at::Tensor*>(all);
    finish((*static_cast<GlooPtr*>(group))->_allgather_base(output, input));
  });
}

// Replaces a tensor by that of process 0.
bool elmo_c10d_broadcast(void* group, void* tensor, char** error) {
  return attempt(error, [&] {
    std::vector<at::Tensor> tensors{*static_cast<at::Tensor*>(tensor)};
    finish((*static_cast<GlooPtr*>(group))->broadcast(tensors));
  });
}

bool elmo_c10d_barrier(void* group, char** error) {
  return attempt(error, [&] { finish((*static_cast<GlooPtr*>(group))->barrier()); });
}

} // extern "C"
