// Where the processes of one world meet: they exchange words and descriptors of shared memory when
// the world, a layer or a reset needs all of them. Never part of a pass. Rank 0 listens on a socket
// in the kernel's abstract namespace (no file, gone with the process), the others connect to it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moxie::transport {

struct Contribution {
  std::string text;
  std::vector<int> descriptors;  // of the receiver, who closes them
};

class Rendezvous {
 public:
  // Waits until all ranks are there. Throws on every rank: Error(invalid_argument) when two claim
  // one rank or they disagree about num_ranks, Error(timeout) when not all come within timeout_s
  // (0: unbounded).
  Rendezvous(const std::string& name, std::int64_t rank, std::int64_t num_ranks, double timeout_s);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Every rank gives, every rank receives all in rank order. `what` names the call in sentences.
  // Throws Error(timeout) on every rank when a rank does not come or its process has ended; the
  // rendezvous is of no use after that.
  std::vector<Contribution> all_gather(const char* what, const std::string& text,
                                       const std::vector<int>& descriptors, double timeout_s);

 private:
  void listen_and_accept(const std::string& address, double timeout_s);
  void connect_to_first(const std::string& address, double timeout_s);
  std::vector<Contribution> gather_at_first(const char* what, Contribution own, double timeout_s);

  std::string name_;
  std::int64_t rank_, num_ranks_;
  std::vector<int> sockets_;  // rank 0: of rank r; others: [0] only; -1: none
};

}  // namespace moxie::transport
