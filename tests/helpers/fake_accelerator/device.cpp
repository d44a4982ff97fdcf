// The device of fake_accelerator/__init__.py, which says what it does. Python calls the functions at the end by ctypes.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreams = 33;  // the default stream, and 32 that are given out in turn, as by CUDA's pool
constexpr int kAskedMax = 20;
constexpr int kPoison = 0xFF;  // NaN in each floating type, -1 in integers
// What jobs are, and what is counted of the first three. A barrier makes a stream wait for an event.
enum Kind { kToDevice, kToHost, kBetween, kKernel, kBarrier };
enum Count { kUnpinned = kBetween + 1, kDeviceBytes, kPinnedBytes, kCounts };

// ------------------------------------------------------------------------------------------------ streams

struct Queue;

// What an event has recorded: the first `at` jobs of a stream.
struct Point {
  Queue* queue = nullptr;
  uint64_t at = 0;
  bool passed() const;
};

struct Job {
  Kind kind;
  Point after;                   // the job begins when this has passed
  std::function<void()> poison;  // runs when the job begins
  std::function<void()> run;     // runs when its delay is over
  bool lazy = false;             // the job begins when somebody waits for it
  double delay_s = 0;
};

struct Queue {
  int device = 0;
  std::deque<Job> jobs;
  uint64_t enqueued = 0, finished = 0;
  uint64_t wanted = 0;  // somebody waits for so many jobs
  uint64_t asked_at = 0;  // the last question was for so many jobs,
  int asked = 0;          // and was asked so often
  bool has_thread = false;
  std::condition_variable ready;  // there is a job, or it is wanted
  std::mt19937_64 random;
};

bool Point::passed() const {
  return queue == nullptr || queue->finished >= at;
}

// Memory of a device, or pinned memory of the host.
struct Block {
  char* at;
  size_t bytes;
  int device;                // -1: pinned
  std::set<Queue*> used_by;  // the block is reused when these have done what they had been given when it was freed
  std::vector<Point> until;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;  // a job has ended
  Queue queues[kDevices][kStreams];
  int next_stream[kDevices] = {};
  bool contexts[kDevices] = {};
  double copy_delay_s = 0, kernel_delay_s = 0;
  unsigned lazy = 0;  // bits: the kinds of jobs that begin when somebody waits for them; the others are done at once
  std::map<std::pair<int, size_t>, std::vector<Block*>> unused;  // by device and bytes
  std::vector<Block*> freed;                 // and still used by a stream
  std::map<uintptr_t, size_t> pinned;        // by pin_memory or by register
  std::set<uintptr_t> registered;
  int64_t counts[kCounts] = {};
  int64_t limits[2] = {INT64_MAX, INT64_MAX};  // bytes of each device, pinned bytes
  int64_t device_bytes[kDevices] = {};
  std::deque<std::pair<const char*, int64_t>> waits;  // of the host: its kind, its thread
};

World& world() {
  static World* made = new World;  // never destroyed: the threads of streams outlive main()
  return *made;
}

using Lock = std::unique_lock<std::mutex>;

void sweep();

void want(Point point) {
  if (point.queue == nullptr || point.queue->wanted >= point.at) return;
  point.queue->wanted = point.at;
  point.queue->ready.notify_one();
}

// Whether it has passed. Only who asks the same again and again is one who waits.
bool ask(Point point) {
  if (point.passed()) return true;
  Queue& queue = *point.queue;
  queue.asked = point.at == queue.asked_at ? queue.asked + 1 : 0;
  queue.asked_at = point.at;
  if (queue.asked == kAskedMax) want(point);
  return false;
}

void work(Queue* queue) {
  pthread_setname_np(pthread_self(), "fake stream");
  World& w = world();
  Lock lock(w.mutex);
  while (true) {
    queue->ready.wait(lock, [&] {
      return !queue->jobs.empty() && (!queue->jobs.front().lazy || queue->wanted > queue->finished);
    });
    {
      Job job = std::move(queue->jobs.front());
      queue->jobs.pop_front();
      want(job.after);
      w.changed.wait(lock, [&] { return job.after.passed(); });
      lock.unlock();
      if (job.poison) job.poison();
      if (job.delay_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(job.delay_s));
      if (job.run) job.run();
    }
    lock.lock();
    queue->finished++;
    sweep();
    w.changed.notify_all();
  }
}

void wait(Lock& lock, Point point) {
  want(point);
  world().changed.wait(lock, [&] { return point.passed(); });
}

// A wait of the host that is counted.
void wait(Lock& lock, Point point, const char* kind) {
  auto& waits = world().waits;
  waits.emplace_back(kind, static_cast<int64_t>(pthread_self()));
  if (waits.size() > 100000) waits.pop_front();
  wait(lock, point);
}

Point enqueue(Lock& lock, Queue* queue, Job job) {
  World& w = world();
  w.contexts[queue->device] = true;
  double delay_s = job.kind == kBarrier ? 0 : job.kind == kKernel ? w.kernel_delay_s : w.copy_delay_s;
  // Every second job takes no time, so that one for which nobody waits is often too early or too late.
  if (delay_s > 0 && queue->random() % 2 == 0) {
    job.delay_s = std::uniform_real_distribution<double>(0, delay_s)(queue->random);
  }
  job.lazy = w.lazy != 0 && (job.kind == kBarrier || (w.lazy >> job.kind & 1) != 0);
  bool at_once = w.lazy != 0 && !job.lazy;
  queue->jobs.push_back(std::move(job));
  if (!queue->has_thread) {
    queue->has_thread = true;
    std::thread(work, queue).detach();
  }
  queue->ready.notify_one();
  Point point{queue, ++queue->enqueued};
  if (at_once) wait(lock, point);
  return point;
}

// ------------------------------------------------------------------------------------------------ devices

thread_local int current_device = 0;
thread_local int current_streams[kDevices] = {};

void set_device(int device, bool makes_context) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no device fake:", device);
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  // Autograd's threads choose their devices when they start, which makes no context with CUDA.
  if (device != current_device && makes_context && strncmp(name, "pt_autograd", 11) != 0) {
    Lock lock(world().mutex);
    world().contexts[device] = true;
  }
  current_device = device;
}

Queue* queue_of(const c10::Stream& stream) {
  return &world().queues[stream.device_index()][stream.id()];
}

Queue* current_queue(c10::Device device) {
  return &world().queues[device.index()][current_streams[device.index()]];
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kFake, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { set_device(device.index(), true); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) set_device(device.index(), false);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    set_device(device.index(), true);
    return before;
  }

  static c10::Stream stream(c10::Device device, int id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  static c10::Device known(c10::Device device) {
    return {kFake, device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current_device)};
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(known(device), 0); }
  c10::Stream getStream(c10::Device device) const override {
    device = known(device);
    return stream(device, current_streams[device.index()]);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    device = known(device);
    World& w = world();
    Lock lock(w.mutex);
    w.contexts[device.index()] = true;
    return stream(device, 1 + w.next_stream[device.index()]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream chosen) const override {
    auto before = getStream(chosen.device());
    current_streams[chosen.device_index()] = static_cast<int>(chosen.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    return ask({queue_of(stream), queue_of(stream)->enqueued});
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    wait(lock, {queue_of(stream), queue_of(stream)->enqueued}, "stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Lock lock(world().mutex);
    wait(lock, {}, "device");
    for (Queue& queue : world().queues[device]) wait(lock, {&queue, queue.enqueued});
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Point;
    Lock lock(world().mutex);
    world().contexts[stream.device_index()] = true;
    *static_cast<Point*>(*event) = {queue_of(stream), queue_of(stream)->enqueued};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Lock lock(world().mutex);
    enqueue(lock, queue_of(stream), {.kind = kBarrier, .after = *static_cast<Point*>(event)});
  }
  bool queryEvent(void* event) const override {
    Lock lock(world().mutex);
    return event == nullptr || ask(*static_cast<Point*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Lock lock(world().mutex);
    wait(lock, *static_cast<Point*>(event), "event");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (memory.get_context() == nullptr) return;
    Lock lock(world().mutex);
    static_cast<Block*>(memory.get_context())->used_by.insert(queue_of(stream));
  }
};

c10::impl::DeviceGuardImplRegistrar guard(kFake, new Guard);

// ------------------------------------------------------------------------------------------------ memory

void make_unused(Block* block) {
  memset(block->at, kPoison, block->bytes);
  block->used_by.clear();
  if (block->device < 0) world().pinned.erase(reinterpret_cast<uintptr_t>(block->at));
  world().unused[{block->device, block->bytes}].push_back(block);
}

// What no stream uses any more is poisoned, and may be given out again.
void sweep() {
  auto& freed = world().freed;
  auto still = std::partition(freed.begin(), freed.end(), [](Block* block) {
    return !std::all_of(block->until.begin(), block->until.end(), [](const Point& point) { return point.passed(); });
  });
  std::for_each(still, freed.end(), make_unused);
  freed.erase(still, freed.end());
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  World& w = world();
  Lock lock(w.mutex);
  if (block->device < 0) {
    w.counts[kPinnedBytes] -= block->bytes;
  } else {
    w.device_bytes[block->device] -= block->bytes;
    w.counts[kDeviceBytes] -= block->bytes;
  }
  block->until.clear();
  for (Queue* queue : block->used_by) block->until.push_back({queue, queue->enqueued});
  w.freed.push_back(block);
  sweep();
}

c10::DataPtr allocate(size_t asked, int device) {
  c10::Device where = device < 0 ? c10::Device(c10::kCPU) : c10::Device(kFake, device);
  if (asked == 0) return {nullptr, nullptr, &release, where};
  size_t bytes = (asked + 63) / 64 * 64;
  World& w = world();
  Lock lock(w.mutex);
  int64_t& used = device < 0 ? w.counts[kPinnedBytes] : w.device_bytes[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, used + static_cast<int64_t>(bytes) <= w.limits[device < 0],
      device < 0 ? "fake out of pinned memory" : "fake out of memory", ": ", asked, " bytes were asked for");
  used += bytes;
  auto& unused = w.unused[{device, bytes}];
  Block* block;
  if (unused.empty()) {
    block = new Block{static_cast<char*>(aligned_alloc(64, bytes)), bytes, device, {}, {}};
    memset(block->at, kPoison, bytes);
  } else {
    block = unused.back();  // what was freed last, so that who still uses it is seen
    unused.pop_back();
  }
  if (device < 0) {
    w.pinned[reinterpret_cast<uintptr_t>(block->at)] = bytes;
  } else {
    w.contexts[device] = true;
    w.counts[kDeviceBytes] += bytes;
    block->used_by.insert(&w.queues[device][current_streams[device]]);
  }
  return {block->at, block, &release, where};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return ::allocate(bytes, current_device); }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Guard().recordDataPtrOnStream(memory, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(world().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].increase(world().device_bytes[device]);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return ::allocate(bytes, -1); }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kFake, &device_memory);

bool is_pinned(const void* memory) {
  auto at = reinterpret_cast<uintptr_t>(memory);
  auto& pinned = world().pinned;
  auto after = pinned.upper_bound(at);
  return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    Lock lock(world().mutex);
    return world().contexts[device];
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device, true); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = static_cast<c10::DeviceIndex>(current_device);
    if (device >= 0) set_device(device, true);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = static_cast<c10::DeviceIndex>(current_device);
    if (device >= 0) set_device(device, false);
    return before;
  }
  bool isPinnedPtr(const void* memory) const override {
    Lock lock(world().mutex);
    return is_pinned(memory);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

// ------------------------------------------------------------------------------------------------ kernels and copies

thread_local bool inside_kernel = false;

// A tensor of the host that lies in the memory of a tensor of the device.
at::Tensor in_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

void poison(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) {
    memset(tensor.data_ptr(), kPoison, tensor.numel() * tensor.itemsize());
    return;
  }
  auto sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  for (auto& stride : strides) stride *= static_cast<int64_t>(tensor.itemsize());
  sizes.push_back(static_cast<int64_t>(tensor.itemsize()));
  strides.push_back(1);
  at::from_blob(tensor.data_ptr(), sizes, strides, at::kByte).fill_(kPoison);
}

// Kernels are ordered by their stream: one waits here for what its stream has been given. That is no wait of the host
// that is counted.
void drain(c10::Device device) {
  Lock lock(world().mutex);
  Queue* queue = current_queue(device);
  wait(lock, {queue, queue->enqueued});
}

// What a kernel has computed: `tensor`, whose stream is idle, gets it later.
void publish(const at::Tensor& tensor, const at::Tensor& value) {
  if (tensor.numel() == 0) return;
  poison(tensor);
  Lock lock(world().mutex);
  enqueue(
      lock, current_queue(tensor.device()),
      {.kind = kKernel, .run = [to = in_host(tensor), value] { to.copy_(value); }});
}

struct Inside {
  Inside() { inside_kernel = true; }
  ~Inside() { inside_kernel = false; }
};

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const std::set<std::string> waits_for_host = {
      "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
  std::set<int> devices;
  auto note = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().type() == kFake) devices.insert(tensor.device().index());
  };
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) note(value.toTensor());
    if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) note(tensor);
  }
  TORCH_CHECK(devices.size() < 2, op.schema().name(), ": the tensors are on both devices");
  for (int device : devices) drain({kFake, static_cast<c10::DeviceIndex>(device)});
  if (waits_for_host.count(op.schema().name()) != 0) {
    Lock lock(world().mutex);
    wait(lock, {}, op.schema().name().c_str());
  }
  Inside inside;
  // This operator writes running statistics, and its schema does not say so.
  static const auto batch_norm = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_native_batch_norm_legit", "");
  bool has_statistics = op.schema().name() == "aten::native_batch_norm" && torch::jit::peek(*stack, 3, 8).isTensor() &&
      torch::jit::peek(*stack, 3, 8).toTensor().defined();
  at::native::cpu_fallback(has_statistics ? batch_norm : op, stack, /*error_on_views=*/true);
}

void enqueue_copy(
    Lock& lock, Queue* queue, Kind kind, char* to, const char* from, size_t bytes, const void* pinned,
    std::shared_ptr<char> kept) {
  world().counts[kind] += bytes;
  Job job{.kind = kind};
  job.poison = [=] { memset(to, kPoison, bytes); };
  // What was given to the stream before may still read the destination.
  if (queue->enqueued == queue->finished) {
    job.poison();
    job.poison = nullptr;
  }
  job.run = [=] {
    bool reachable = true;
    if (pinned != nullptr) {
      Lock lock(world().mutex);
      reachable = is_pinned(pinned);  // unless it was freed, or unregistered
    }
    if (reachable) memcpy(to, from, bytes);
    (void)kept;
  };
  enqueue(lock, queue, std::move(job));
}

// Streams that use pinned memory delay its reuse, if the tensor has the memory itself (and not an array made from it).
void used_by(const at::Tensor& host, Queue* queue) {
  const c10::DataPtr& memory = host.storage().data_ptr();
  if (memory.get_deleter() == &release && memory.get_context() != nullptr) {
    static_cast<Block*>(memory.get_context())->used_by.insert(queue);
  }
}

// Copy between contiguous tensors of the same type and shape, one of which is on the host.
void copy_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool to_device = to.device().type() == kFake;
  const at::Tensor& host = to_device ? from : to;
  auto* source = static_cast<const char*>(from.const_data_ptr());
  size_t bytes = to.numel() * to.itemsize();
  World& w = world();
  Lock lock(w.mutex);
  Queue* queue = current_queue(to_device ? to.device() : from.device());
  std::shared_ptr<char> kept;
  const void* pinned = is_pinned(host.const_data_ptr()) ? host.const_data_ptr() : nullptr;
  if (pinned != nullptr) {
    used_by(host, queue);
  } else if (non_blocking) {
    w.counts[kUnpinned] += bytes;
    if (to_device) {  // CUDA returns when it has taken the bytes
      kept = std::shared_ptr<char>(new char[bytes], std::default_delete<char[]>());
      memcpy(kept.get(), source, bytes);
      source = kept.get();
    } else {
      non_blocking = false;
    }
  }
  enqueue_copy(
      lock, queue, to_device ? kToDevice : kToHost, static_cast<char*>(to.data_ptr()), source, bytes, pinned,
      std::move(kept));
  if (!non_blocking) wait(lock, {queue, queue->enqueued}, "copy");
}

// As CUDA does, the stream of the source copies, after and before what the stream of the destination does.
void copy_between(const at::Tensor& from, const at::Tensor& to) {
  Lock lock(world().mutex);
  Queue *reads = current_queue(from.device()), *writes = current_queue(to.device());
  enqueue(lock, reads, {.kind = kBarrier, .after = {writes, writes->enqueued}});
  enqueue_copy(
      lock, reads, kBetween, static_cast<char*>(to.data_ptr()), static_cast<const char*>(from.const_data_ptr()),
      to.numel() * to.itemsize(), nullptr, nullptr);
  enqueue(lock, writes, {.kind = kBarrier, .after = {reads, reads->enqueued}});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool from_fake = from.device().type() == kFake, to_fake = to.device().type() == kFake;
  if (to.numel() == 0) return to;
  if (inside_kernel) {
    if (to_fake) {
      publish(to, from_fake ? in_host(from).clone() : from);
    } else {
      to.copy_(in_host(from));
    }
  } else if (from.device() == to.device()) {
    drain(to.device());
    auto value = at::empty_like(to, to.options().device(at::kCPU));
    value.copy_(in_host(from.expand_as(to)));
    publish(to, value);
  } else if (from.scalar_type() != to.scalar_type() || !to.is_contiguous() || !from.is_contiguous() ||
             from.sizes() != to.sizes()) {
    // As CUDA does: each side makes its part contiguous.
    auto source = from.to(to.scalar_type()).expand_as(to).contiguous();
    auto target = to.is_contiguous() ? to : at::empty_like(to, at::MemoryFormat::Contiguous);
    target.copy_(source, non_blocking && to_fake);
    if (!target.is_same(to)) to.copy_(target);
  } else if (from_fake && to_fake) {
    copy_between(from, to);
  } else {
    copy_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Guard::known(device.value_or(c10::Device(kFake))));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      type.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Guard::known(device.value_or(c10::Device(kFake))));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      type.value_or(at::get_default_dtype_as_scalartype()));
}

// The bytes move to larger memory.
void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  drain(storage.device());
  auto memory = allocate(bytes, storage.device().index());
  if (bytes != 0 && storage.nbytes() != 0) memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  resize_storage(storage, bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  drain(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

// The function, with the device of its arguments as the current one.
template <auto function>
struct OnDevice;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct OnDevice<function> {
  static Result call(Arguments... arguments) {
    c10::OptionalDeviceGuard guard;
    (note(guard, arguments), ...);
    return function(arguments...);
  }
  template <class Any>
  static void note(c10::OptionalDeviceGuard&, const Any&) {}
  static void note(c10::OptionalDeviceGuard& guard, const at::Tensor& tensor) { guard.reset_device(tensor.device()); }
  static void note(c10::OptionalDeviceGuard& guard, const std::optional<c10::Device>& device) {
    if (device.has_value()) guard.reset_device(Guard::known(*device));
  }
};

// What sparse tensors are made of; the rest goes through the CPU in Python.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", &OnDevice<&at::native::empty_sparse>::call);
  m.impl("_sparse_coo_tensor_with_dims", &OnDevice<&at::native::new_with_dims_sparse>::call);
  m.impl(
      "_sparse_coo_tensor_with_dims_and_tensors",
      &OnDevice<&at::native::new_with_dims_and_tensor_sparse_symint>::call);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("_dimI", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_dimV", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("sparse_resize_", &at::native::sparse_resize_);
  m.impl("clone", &OnDevice<&at::native::clone_sparse>::call);
  m.impl("copy_", &at::native::copy_sparse_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

// ------------------------------------------------------------------------------------------------ for Python

extern "C" {

void fake_begin() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

void fake_delays(double copy_s, double kernel_s, uint64_t seed, unsigned lazy) {
  Lock lock(world().mutex);
  world().copy_delay_s = copy_s;
  world().kernel_delay_s = kernel_s;
  world().lazy = lazy;
  for (int device = 0; device < kDevices; device++) {
    for (int stream = 0; stream < kStreams; stream++) {
      Queue& queue = world().queues[device][stream];
      queue.device = device;
      queue.random.seed(seed * 1000 + device * 100 + stream);
      queue.wanted = queue.enqueued;  // what was lazy until now is done
      queue.ready.notify_one();
    }
  }
}

void fake_limits(int64_t device_bytes, int64_t pinned_bytes) {
  Lock lock(world().mutex);
  world().limits[0] = device_bytes;
  world().limits[1] = pinned_bytes;
}

int64_t fake_count(int which) {
  Lock lock(world().mutex);
  return world().counts[which];
}

int fake_context(int device) {
  Lock lock(world().mutex);
  return world().contexts[device];
}

// The oldest wait of the host, which is forgotten; false: there is none.
int fake_take_wait(char* kind, int size, int64_t* thread) {
  Lock lock(world().mutex);
  if (world().waits.empty()) return 0;
  snprintf(kind, size, "%s", world().waits.front().first);
  *thread = world().waits.front().second;
  world().waits.pop_front();
  return 1;
}

// The results are those of cudaHostRegister and cudaHostUnregister: 0, 2 (no memory), 712 and 713.
int fake_register(uintptr_t at, size_t bytes) {
  World& w = world();
  Lock lock(w.mutex);
  if (is_pinned(reinterpret_cast<void*>(at)) || is_pinned(reinterpret_cast<void*>(at + bytes - 1))) return 712;
  if (w.counts[kPinnedBytes] + static_cast<int64_t>(bytes) > w.limits[1]) return 2;
  w.counts[kPinnedBytes] += bytes;
  w.pinned[at] = bytes;
  w.registered.insert(at);
  return 0;
}

int fake_unregister(uintptr_t at) {
  World& w = world();
  Lock lock(w.mutex);
  if (w.registered.erase(at) == 0) return 713;
  w.counts[kPinnedBytes] -= w.pinned[at];
  w.pinned.erase(at);
  return 0;
}
}
