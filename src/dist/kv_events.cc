#include "dist/kv_events.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <zmq.hpp>

#include "core/log.h"

#ifdef __SANITIZE_THREAD__
// libzmq is not instrumented: ThreadSanitizer cannot see how its queues order what it reads.
extern "C" const char* __tsan_default_suppressions() {  // NOLINT(bugprone-reserved-identifier)
  return "called_from_lib:libzmq.so\n";
}
#endif

namespace fathom {
namespace {

// Beside the counts of the configuration, which say nothing about sizes: a batch may hold a whole
// context of blocks.
constexpr int64_t kQueueBytes = int64_t{256} << 20;
constexpr int64_t kReplayBytes = int64_t{256} << 20;
constexpr int kLingerMs = 500;
constexpr int64_t kReplayRequestBytes = 1024;  // a request is an 8-byte number
constexpr uint64_t kReplayEnd = ~uint64_t{0};  // vLLM's sequence number -1

struct Batch {
  uint64_t sequence = 0;
  double timestamp = 0;
  int64_t bytes = 0;
  std::vector<CacheEvent> events;
};

struct SentBatch {
  uint64_t sequence = 0;
  zmq::message_t payload;  // shares its bytes with what ZeroMQ still has to send
};

int64_t SizeInMemory(const std::vector<CacheEvent>& events) {
  int64_t bytes = static_cast<int64_t>(sizeof(Batch) + events.size() * sizeof(CacheEvent));
  for (const CacheEvent& event : events) {
    bytes += static_cast<int64_t>(event.tokens.size() * sizeof(TokenId));
  }
  return bytes;
}

std::array<uint8_t, 8> BigEndian(uint64_t value) {
  std::array<uint8_t, 8> bytes;
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(value >> (56 - 8 * i));
  return bytes;
}

uint64_t FromBigEndian(const zmq::message_t& message) {
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i) value = value << 8 | message.data<uint8_t>()[i];
  return value;
}

double Now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Binds or connects; the address in use, or kUnavailable with the one that failed.
Expected<std::string> Open(zmq::socket_t& socket, const std::string& endpoint, bool bind) {
  try {
    socket.set(zmq::sockopt::linger, kLingerMs);
    // Only where it is asked for: with it a wildcard would need a kernel that has IPv6.
    if (endpoint.find('[') != std::string::npos) socket.set(zmq::sockopt::ipv6, true);
    if (bind) socket.bind(endpoint);
    else socket.connect(endpoint);
    return socket.get(zmq::sockopt::last_endpoint);
  } catch (const zmq::error_t& error) {
    return FailParam(Code::kUnavailable, "--kv-events-config",
                     "--kv-events-config: cannot {} {}: {}", bind ? "listen on" : "connect to",
                     endpoint, error.what());
  }
}

}  // namespace

struct KvEventPublisher::Impl {
  explicit Impl(const KvEventsConfig& settings, const KvEventFormat& event_format)
      : config(settings), format(event_format) {
    format.encoding = config.encoding;
  }
  ~Impl() {
    if (thread.joinable()) {
      stopping = true;
      Wake();
      thread.join();
    }
    if (wake_fd >= 0) close(wake_fd);
  }

  Status OpenSockets();
  void Wake() {
    const uint64_t one = 1;
    // It fails only when the counter is at its end, and then the thread is awake anyway.
    [[maybe_unused]] const ssize_t written = write(wake_fd, &one, sizeof(one));
  }
  void Run();
  void SendQueued();
  void Send(const Batch& batch);
  void AnswerReplays();
  void Replay(zmq::message_t& client, uint64_t from);
  bool SendReplayFrames(zmq::message_t& client, std::string_view topic, uint64_t sequence,
                        zmq::message_t payload);

  const KvEventsConfig config;
  KvEventFormat format;
  std::string endpoint, replay_endpoint;
  int wake_fd = -1;
  std::atomic<bool> stopping{false};

  mutable std::mutex mutex;  // guards the following
  std::deque<Batch> queue;
  int64_t queue_bytes = 0;
  uint64_t next_sequence = 0;
  bool dropping = false;
  Stats stats;

  // Of the thread, once it runs. The context closes last.
  zmq::context_t context{1};
  zmq::socket_t publish, replay;
  std::deque<SentBatch> sent;
  int64_t sent_bytes = 0;
  std::thread thread;
};

Status KvEventPublisher::Impl::OpenSockets() {
  wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) return Fail(Code::kUnavailable, "eventfd: {}", std::strerror(errno));
  try {
    publish = zmq::socket_t(context, zmq::socket_type::pub);
    publish.set(zmq::sockopt::sndhwm, static_cast<int>(config.hwm));
    if (!config.replay_endpoint.empty()) {
      replay = zmq::socket_t(context, zmq::socket_type::router);
      // A whole replay fits a client's queue, also while ZeroMQ still counts up to half of an
      // earlier one as unread; what goes beyond it is refused, never lost in silence.
      replay.set(zmq::sockopt::sndhwm, static_cast<int>(2 * config.buffer_steps + 4));
      replay.set(zmq::sockopt::router_mandatory, true);
      replay.set(zmq::sockopt::maxmsgsize, kReplayRequestBytes);
    }
  } catch (const zmq::error_t& error) {
    return Fail(Code::kUnavailable, "--kv-events-config: no ZeroMQ socket: {}", error.what());
  }
  FATHOM_ASSIGN(endpoint, Open(publish, config.endpoint, BindsEndpoint(config.endpoint)));
  if (replay.handle() != nullptr) {
    FATHOM_ASSIGN(replay_endpoint, Open(replay, config.replay_endpoint, true));
  }
  return {};
}

void KvEventPublisher::Impl::Run() {
  std::array<zmq::pollitem_t, 2> items = {
      {{nullptr, wake_fd, ZMQ_POLLIN, 0}, {replay.handle(), 0, ZMQ_POLLIN, 0}}};
  const size_t count = replay.handle() != nullptr ? 2 : 1;
  for (bool last = false; !last;) {
    try {
      zmq::poll(items.data(), count, std::chrono::milliseconds(-1));
      if (items[0].revents != 0) {
        uint64_t wakes = 0;
        [[maybe_unused]] const ssize_t got = read(wake_fd, &wakes, sizeof(wakes));
      }
      last = stopping;  // before the queue is emptied: nothing is published after it is set
      SendQueued();
      if (count == 2 && items[1].revents != 0) AnswerReplays();
    } catch (const std::exception& error) {
      Log().error("KV events: {}", error.what());
    }
  }
  publish.close();
  replay.close();
}

void KvEventPublisher::Impl::SendQueued() {
  while (true) {
    Batch batch;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (queue.empty()) return;
      batch = std::move(queue.front());
      queue.pop_front();
      queue_bytes -= batch.bytes;
    }
    Send(batch);
  }
}

void KvEventPublisher::Impl::Send(const Batch& batch) {
  const std::string bytes = EncodeKvEvents(batch.events, batch.timestamp, format);
  SentBatch kept{batch.sequence, zmq::message_t(bytes)};
  zmq::message_t payload;
  payload.copy(kept.payload);
  {  // before a subscriber can have it: who has seen a batch finds it counted
    const std::lock_guard<std::mutex> lock(mutex);
    ++stats.batches;
    stats.events += batch.events.size();
  }
  publish.send(zmq::buffer(config.topic), zmq::send_flags::sndmore);
  publish.send(zmq::buffer(BigEndian(batch.sequence)), zmq::send_flags::sndmore);
  publish.send(payload, zmq::send_flags::none);
  sent_bytes += static_cast<int64_t>(kept.payload.size());
  sent.push_back(std::move(kept));
  while (!sent.empty() &&
         (static_cast<int64_t>(sent.size()) > config.buffer_steps || sent_bytes > kReplayBytes)) {
    sent_bytes -= static_cast<int64_t>(sent.front().payload.size());
    sent.pop_front();
  }
}

// A request is (identity, empty frame, first sequence number wanted as 8 bytes).
void KvEventPublisher::Impl::AnswerReplays() {
  while (true) {
    std::vector<zmq::message_t> frames;
    do {
      frames.emplace_back();
      if (!replay.recv(frames.back(), zmq::recv_flags::dontwait)) return;
    } while (frames.back().more());
    if (frames.size() != 3 || frames[1].size() != 0 || frames[2].size() != 8) {
      Log().debug("KV events: a replay request of {} frames was ignored", frames.size());
      continue;
    }
    Replay(frames[0], FromBigEndian(frames[2]));
  }
}

void KvEventPublisher::Impl::Replay(zmq::message_t& client, uint64_t from) {
  try {
    for (SentBatch& batch : sent) {
      if (batch.sequence < from) continue;
      zmq::message_t payload;
      payload.copy(batch.payload);
      if (!SendReplayFrames(client, config.topic, batch.sequence, std::move(payload))) {
        // Without the end marker the client knows that it has not got everything.
        Log().debug("KV events: a replay client does not read what it asked for");
        return;
      }
    }
    // Under the lock: who has seen the end marker finds the request counted.
    const std::lock_guard<std::mutex> lock(mutex);
    if (SendReplayFrames(client, "", kReplayEnd, zmq::message_t())) ++stats.replays;
  } catch (const zmq::error_t& error) {  // EHOSTUNREACH: the client has gone
    Log().debug("KV events: replay: {}", error.what());
  }
}

bool KvEventPublisher::Impl::SendReplayFrames(zmq::message_t& client, std::string_view topic,
                                              uint64_t sequence, zmq::message_t payload) {
  zmq::message_t identity;
  identity.copy(client);
  // Only the first frame can meet a full queue: a message is taken whole or not at all.
  const auto begin = [&] {
    return replay.send(identity, zmq::send_flags::sndmore | zmq::send_flags::dontwait).has_value();
  };
  if (!begin()) {
    // ZeroMQ looks only every millisecond or so what a client has read; asked for events it does.
    (void)replay.get(zmq::sockopt::events);
    if (!begin()) return false;
  }
  replay.send(zmq::message_t(), zmq::send_flags::sndmore);
  replay.send(zmq::buffer(topic), zmq::send_flags::sndmore);
  replay.send(zmq::buffer(BigEndian(sequence)), zmq::send_flags::sndmore);
  replay.send(payload, zmq::send_flags::none);
  return true;
}

KvEventPublisher::KvEventPublisher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvEventPublisher::~KvEventPublisher() = default;

Expected<std::unique_ptr<KvEventPublisher>> KvEventPublisher::Start(const KvEventsConfig& config,
                                                                    const KvEventFormat& format) {
  FATHOM_CHECK(config.publishes());
  auto impl = std::make_unique<Impl>(config, format);
  FATHOM_TRY(impl->OpenSockets());
  impl->thread = std::thread([owner = impl.get()] { owner->Run(); });
  return std::unique_ptr<KvEventPublisher>(new KvEventPublisher(std::move(impl)));
}

void KvEventPublisher::Publish(std::vector<CacheEvent> events) {
  if (events.empty()) return;
  Batch batch;
  batch.timestamp = Now();
  batch.bytes = SizeInMemory(events);
  batch.events = std::move(events);
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    batch.sequence = impl_->next_sequence++;
    const bool full = static_cast<int64_t>(impl_->queue.size()) >= impl_->config.max_queue_size ||
                      impl_->queue_bytes + batch.bytes > kQueueBytes;
    if (full) {
      ++impl_->stats.dropped_batches;
      impl_->stats.dropped_events += batch.events.size();
      if (!impl_->dropping) Log().warn("KV events: the queue is full, batches are dropped");
      impl_->dropping = true;
      return;
    }
    impl_->dropping = false;
    impl_->queue_bytes += batch.bytes;
    impl_->queue.push_back(std::move(batch));
  }
  impl_->Wake();
}

const std::string& KvEventPublisher::endpoint() const {
  return impl_->endpoint;
}
const std::string& KvEventPublisher::replay_endpoint() const {
  return impl_->replay_endpoint;
}

KvEventPublisher::Stats KvEventPublisher::stats() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->stats;
}

}  // namespace fathom
