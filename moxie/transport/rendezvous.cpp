#include "moxie/transport/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <optional>
#include <thread>

#include "moxie/core/error.h"
#include "moxie/transport/deadline.h"

namespace moxie::transport {
namespace {

constexpr std::size_t kMaxText = 4096, kMaxDescriptors = 4;
constexpr char kGood = '+', kBad = '-';  // first byte of what rank 0 sends
constexpr double kManners_s = 2;  // for a hello after connecting, and to take in why it is over

[[noreturn]] void fail(const std::string& sentence, ErrorCode code = ErrorCode::timeout) {
  throw Error(code, sentence);
}

// Time left, as poll() takes it: whole milliseconds, -1 for ever.
int poll_ms(const Deadline& deadline) {
  const double left_s = deadline.left_s();
  return std::isinf(left_s) ? -1 : static_cast<int>(std::clamp(left_s * 1e3, 0.0, 1e9)) + 1;
}

// Of a rank that waits for rank 0, which has the same patience and tells who did not come: a little
// more, for it to do so.
Deadline deadline_behind_first(double timeout_s) {
  constexpr double kToTell_s = 1;
  return Deadline(timeout_s > 0 ? timeout_s + kToTell_s : 0);
}

// Waits until the socket can be read (POLLIN) or written (POLLOUT). A signal of the program is no
// reason to give up. False: the deadline.
bool wait_for(int socket, short what, const Deadline& deadline) {
  for (;;) {
    pollfd wait{socket, what, 0};
    const int ready = ::poll(&wait, 1, poll_ms(deadline));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

// False: the peer has ended, or does not read what was sent before and the deadline is over.
bool send_message(int socket, const std::string& text, const std::vector<int>& descriptors,
                  const Deadline& deadline) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const std::size_t num_bytes = sizeof(int) * descriptors.size();
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(num_bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(num_bytes);
    std::memcpy(CMSG_DATA(header), descriptors.data(), num_bytes);
  }
  for (;;) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return sent == static_cast<ssize_t>(text.size());
    if (errno == EINTR) continue;
    const bool full = errno == EAGAIN || errno == EWOULDBLOCK;
    if (!full || !wait_for(socket, POLLOUT, deadline)) return false;
  }
}

enum class Received { message, timed_out, ended };
// Messages keep their borders (SOCK_SEQPACKET) and are never empty.
Received receive_message(int socket, const Deadline& deadline, Contribution& into) {
  if (!wait_for(socket, POLLIN, deadline)) return Received::timed_out;
  into.text.resize(kMaxText + 1);  // what rank 0 sends on has a byte more
  iovec part{into.text.data(), into.text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t num_bytes = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  // A peer that has closed without reading everything: said once, before what it had sent.
  if (num_bytes < 0 && errno == ECONNRESET)
    num_bytes = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (num_bytes <= 0) return Received::ended;
  into.text.resize(static_cast<std::size_t>(num_bytes));
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    into.descriptors.resize((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(into.descriptors.data(), CMSG_DATA(h), into.descriptors.size() * sizeof(int));
  }
  return Received::message;
}

int make_socket() {
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (socket < 0)
    fail(fmt::format("no socket can be had: {}", std::strerror(errno)), ErrorCode::unavailable);
  return socket;
}

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
  explicit Address(const std::string& text) {
    name.sun_family = AF_UNIX;  // sun_path[0] stays 0: the abstract namespace
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

// What was received before it failed, own contribution included, is of no use to anybody.
[[noreturn]] void give_up(const std::vector<Contribution>& all, const std::string& problem) {
  for (const Contribution& one : all)
    for (const int descriptor : one.descriptors) ::close(descriptor);
  fail(problem + "; make a new World");
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

}  // namespace

Rendezvous::Rendezvous(const std::string& name, std::int64_t rank, std::int64_t num_ranks,
                       double timeout_s)
    : name_(name), rank_(rank), num_ranks_(num_ranks) {
  const std::string address = fmt::format("moxie.{}.{}", ::geteuid(), name);
  constexpr std::size_t kMaxAddress = sizeof(sockaddr_un::sun_path) - 1;
  if (name.empty() || address.size() > kMaxAddress) {
    fail(fmt::format("name of a process world has {} characters, must have between 1 and {}",
                     name.size(), kMaxAddress - (address.size() - name.size())),
         ErrorCode::invalid_argument);
  }
  try {
    rank == 0 ? listen_and_accept(address, timeout_s) : connect_to_first(address, timeout_s);
  } catch (...) {
    for (const int socket : sockets_)
      if (socket >= 0) ::close(socket);
    throw;
  }
}

Rendezvous::~Rendezvous() {
  for (const int socket : sockets_)
    if (socket >= 0) ::close(socket);
}

void Rendezvous::listen_and_accept(const std::string& address, double timeout_s) {
  const Deadline deadline(timeout_s);
  sockets_.assign(static_cast<std::size_t>(num_ranks_), -1);
  const int listener = make_socket();
  const Address at(address);
  while (::bind(listener, at.get(), at.length) != 0) {  // a world of that name is just being made
    if (errno == EADDRINUSE && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      continue;
    }
    ::close(listener);
    fail(fmt::format("rank 0 cannot have the name '{}' of a process world: {}", name_,
                     std::strerror(errno)),
         ErrorCode::invalid_argument);
  }
  ::listen(listener, static_cast<int>(num_ranks_));
  std::string problem;
  ErrorCode code = ErrorCode::invalid_argument;
  std::vector<int> strangers;  // connected, but no rank of this world: they hear why
  std::int64_t missing = num_ranks_ - 1;
  while (missing > 0 && problem.empty()) {
    if (!wait_for(listener, POLLIN, deadline)) {
      for (std::int64_t r = 1; r < num_ranks_; ++r)
        if (sockets_[static_cast<std::size_t>(r)] < 0)
          problem += (problem.empty() ? "" : ", ") + std::to_string(r);
      problem = fmt::format("rank {} of {} did not come to process world '{}' within {} s", problem,
                            num_ranks_, name_, timeout_s);
      code = ErrorCode::timeout;
      break;
    }
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Contribution hello;
    if (socket < 0 || !same_user(socket) ||
        receive_message(socket, Deadline(kManners_s), hello) != Received::message) {
      if (socket >= 0) ::close(socket);
      continue;
    }
    std::int64_t rank = -1, ranks = -1;
    std::sscanf(hello.text.c_str(), "%ld of %ld", &rank, &ranks);
    if (ranks != num_ranks_) {
      problem = fmt::format(
          "rank {} of process world '{}' says num_ranks {}, rank 0 says {}; must "
          "be the same on every rank",
          rank, name_, ranks, num_ranks_);
    } else if (rank < 1 || rank >= num_ranks_ || sockets_[static_cast<std::size_t>(rank)] >= 0) {
      problem = fmt::format("two processes came to process world '{}' as rank {}, must be one each",
                            name_, rank);
    }
    if (problem.empty()) {
      sockets_[static_cast<std::size_t>(rank)] = socket;
      --missing;
    } else {
      strangers.push_back(socket);
    }
  }
  ::close(listener);
  const std::string answer = problem.empty() ? std::string(1, kGood) : kBad + problem;
  for (const int socket : sockets_)
    if (socket >= 0) send_message(socket, answer, {}, Deadline(kManners_s));
  for (const int socket : strangers) {
    send_message(socket, answer, {}, Deadline(kManners_s));
    ::close(socket);
  }
  if (!problem.empty()) fail(problem, code);
}

void Rendezvous::connect_to_first(const std::string& address, double timeout_s) {
  const Deadline deadline(timeout_s);
  const Address at(address);
  sockets_.push_back(make_socket());
  while (::connect(sockets_[0], at.get(), at.length) != 0) {
    if (deadline.expired()) {
      fail(fmt::format("rank {} found no rank 0 of process world '{}' within {} s", rank_, name_,
                       timeout_s));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (!same_user(sockets_[0]))
    fail(fmt::format("process world '{}' belongs to another user", name_),
         ErrorCode::invalid_argument);
  send_message(sockets_[0], fmt::format("{} of {}", rank_, num_ranks_), {}, deadline);
  Contribution answer;
  const Received seen = receive_message(sockets_[0], deadline_behind_first(timeout_s), answer);
  if (seen != Received::message) {
    fail(fmt::format("rank 0 of process world '{}' {} before all ranks were there", name_,
                     seen == Received::ended ? "ended" : "said nothing"));
  }
  if (answer.text[0] != kGood) {
    const bool late = answer.text.find("did not come") != std::string::npos;
    fail(answer.text.substr(1), late ? ErrorCode::timeout : ErrorCode::invalid_argument);
  }
}

std::vector<Contribution> Rendezvous::gather_at_first(const char* what, Contribution own,
                                                      double timeout_s) {
  const Deadline deadline(timeout_s);
  std::vector<Contribution> all(static_cast<std::size_t>(num_ranks_));
  all[0] = std::move(own);
  std::string problem;
  for (std::size_t r = 1; r < all.size() && problem.empty(); ++r) {
    const Received seen = receive_message(sockets_[r], deadline, all[r]);
    if (seen == Received::timed_out)
      problem = fmt::format("rank {} did not come to {} within {} s", r, what, timeout_s);
    if (seen == Received::ended)
      problem = fmt::format("rank {} did not come to {}: its process or World has ended", r, what);
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (!problem.empty()) {
      send_message(sockets_[r], kBad + problem, {}, Deadline(kManners_s));
      continue;
    }
    for (const Contribution& one : all)
      send_message(sockets_[r], kGood + one.text, one.descriptors, deadline);
  }
  if (problem.empty()) return all;
  give_up(all, problem);
}

std::vector<Contribution> Rendezvous::all_gather(const char* what, const std::string& text,
                                                 const std::vector<int>& descriptors,
                                                 double timeout_s) {
  if (rank_ == 0) {
    Contribution own{text, {}};
    for (const int descriptor : descriptors) own.descriptors.push_back(::dup(descriptor));
    return gather_at_first(what, std::move(own), timeout_s);
  }
  const Deadline deadline = deadline_behind_first(timeout_s);
  send_message(sockets_[0], text, descriptors, deadline);
  std::vector<Contribution> all(static_cast<std::size_t>(num_ranks_));
  for (Contribution& one : all) {
    const Received seen = receive_message(sockets_[0], deadline, one);
    if (seen == Received::message && one.text[0] == kGood) {
      one.text.erase(0, 1);
      continue;
    }
    const std::string reason =
        seen == Received::message ? one.text.substr(1)
        : seen == Received::ended
            ? fmt::format("rank 0 did not come to {}: its process or World has ended", what)
            : fmt::format("rank 0 did not come to {} within {} s", what, timeout_s);
    give_up(all, reason);
  }
  return all;
}

}  // namespace moxie::transport
