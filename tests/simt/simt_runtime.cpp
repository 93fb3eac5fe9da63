// The scheduler behind simt.hpp. Compiled without sanitizers, and free of templates that the instrumented file may also
// instantiate: the linker keeps one copy of those, and the sanitizer would then watch the scheduler too.

#include <pthread.h>
#include <sched.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

#include "simt.hpp"

extern "C" {  // weak: there only when the program is linked with ThreadSanitizer
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

namespace simt {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kNoImpliedOrder = 1;  // __tsan_switch_to_fiber_no_sync

enum State { kReady, kAtBarrier, kAtWarpOperation, kDone };

struct Fiber {
  ucontext_t context;
  void* tsan;
  unsigned thread;
  State state;
  unsigned mask;
  const char* operation;
  std::uint64_t value;
  std::uint64_t received[32];
};

struct Random {
  std::uint64_t state;
  unsigned below(unsigned bound) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>(state >> 33) % bound;
  }
};

struct Launch {
  unsigned blocks, threads;
  std::size_t shared_bytes;
  std::uint64_t seed;
  void (*kernel)(void*);
  void* arguments;
  unsigned* order;
  unsigned next;
  char begin, end;  // addresses at which the sanitizer sees the launch ordered with its caller
};

struct Block {
  Launch* launch;
  unsigned number;
  Fiber* fibers;
  Fiber* current;
  char* shared;
  ucontext_t scheduler;
  void* scheduler_tsan;
  Random random;
  char order_of_warp[kMaxThreads / 32], order_of_barrier, begin, end;  // likewise, inside the block
};

thread_local Block* block = nullptr;

void release(void* address) {
  if (__tsan_release) __tsan_release(address);
}

void acquire(void* address) {
  if (__tsan_acquire) __tsan_acquire(address);
}

void tell_sanitizer(void* fiber) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber, kNoImpliedOrder);
}

void to_scheduler() {
  Fiber* self = block->current;
  tell_sanitizer(block->scheduler_tsan);
  swapcontext(&self->context, &block->scheduler);
}

void fiber_main() {
  acquire(&block->begin);
  block->launch->kernel(block->launch->arguments);
  release(&block->end);
  block->current->state = kDone;
  to_scheduler();
}

void start_fibers(Block& b, char* stacks) {
  for (unsigned t = 0; t < b.launch->threads; ++t) {
    Fiber& fiber = b.fibers[t];
    fiber.thread = t;
    fiber.state = kReady;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + kStackBytes * t;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    if (__tsan_create_fiber) fiber.tsan = __tsan_create_fiber(0);
  }
}

bool lanes_have_met(const Block& b, unsigned first, const Fiber& fiber) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(fiber.mask >> lane & 1u)) continue;
    if (first + lane >= b.launch->threads) return false;
    const Fiber& other = b.fibers[first + lane];
    if (other.state != kAtWarpOperation || other.mask != fiber.mask) return false;
    if (std::strcmp(other.operation, fiber.operation) != 0) return false;
  }
  return true;
}

// Completes the operations of one warp whose lanes have all arrived.
void complete_warp(Block& b, unsigned first) {
  for (unsigned lane = 0; lane < 32 && first + lane < b.launch->threads; ++lane) {
    const Fiber& fiber = b.fibers[first + lane];
    if (fiber.state != kAtWarpOperation || !lanes_have_met(b, first, fiber)) continue;
    const unsigned mask = fiber.mask;
    for (unsigned to = 0; to < 32; ++to) {
      if (!(mask >> to & 1u)) continue;
      Fiber& receiver = b.fibers[first + to];
      for (unsigned from = 0; from < 32; ++from) {
        receiver.received[from] = mask >> from & 1u ? b.fibers[first + from].value : 0;
      }
      receiver.state = kReady;
    }
  }
}

unsigned ready_in_warp(const Block& b, unsigned first, Fiber** ready) {
  unsigned count = 0;
  for (unsigned t = first; t < first + 32 && t < b.launch->threads; ++t) {
    if (b.fibers[t].state == kReady) ready[count++] = &b.fibers[t];
  }
  return count;
}

unsigned in_state(const Block& b, State state) {
  unsigned count = 0;
  for (unsigned t = 0; t < b.launch->threads; ++t) count += b.fibers[t].state == state;
  return count;
}

[[noreturn]] void report_deadlock(const Block& b) {
  const char* operation = "none";
  for (unsigned t = 0; t < b.launch->threads; ++t) {
    if (b.fibers[t].state == kAtWarpOperation) operation = b.fibers[t].operation;
  }
  std::fprintf(stderr, "SIMT: deadlock in block %u: %u at a barrier, %u have returned, %u in warp operations (%s)\n",
               b.number, in_state(b, kAtBarrier), in_state(b, kDone), in_state(b, kAtWarpOperation), operation);
  std::abort();
}

// The thread to run next, or null when all have returned. One warp tends to run ahead of the others, because
// most missing barriers show only then.
Fiber* choose(Block& b, unsigned& warp) {
  const unsigned warps = (b.launch->threads + 31) / 32;
  Fiber* ready[32];
  if (b.random.below(16) == 0) warp = b.random.below(warps);
  for (;;) {
    const unsigned start = warp;
    for (unsigned i = 0; i < warps; ++i) {
      warp = (start + i) % warps;
      complete_warp(b, warp * 32);
      const unsigned count = ready_in_warp(b, warp * 32, ready);
      if (count > 0) return ready[b.random.below(count)];
    }
    if (in_state(b, kDone) == b.launch->threads) return nullptr;
    if (in_state(b, kAtBarrier) != b.launch->threads) report_deadlock(b);
    for (unsigned t = 0; t < b.launch->threads; ++t) b.fibers[t].state = kReady;
    warp = b.random.below(warps);
  }
}

void run_block(Launch& launch, unsigned number, Fiber* fibers, char* stacks) {
  Block b;
  b.launch = &launch;
  b.number = number;
  b.fibers = fibers;
  b.random.state = launch.seed * 7919 + number;
  b.shared = static_cast<char*>(std::malloc(launch.shared_bytes));
  std::memset(b.shared, 0xCD, launch.shared_bytes);
  b.scheduler_tsan = __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr;
  block = &b;
  release(&b.begin);
  start_fibers(b, stacks);
  unsigned warp = 0;
  while (Fiber* fiber = choose(b, warp)) {
    b.current = fiber;
    tell_sanitizer(fiber->tsan);
    swapcontext(&b.scheduler, &fiber->context);
  }
  acquire(&b.end);
  for (unsigned t = 0; t < launch.threads; ++t) {
    if (__tsan_destroy_fiber) __tsan_destroy_fiber(fibers[t].tsan);
  }
  block = nullptr;
  std::free(b.shared);
}

void* work(void* argument) {
  Launch& launch = *static_cast<Launch*>(argument);
  acquire(&launch.begin);
  Fiber* fibers = static_cast<Fiber*>(std::calloc(launch.threads, sizeof(Fiber)));
  char* stacks = static_cast<char*>(std::malloc(kStackBytes * launch.threads));
  for (;;) {
    const unsigned i = __atomic_fetch_add(&launch.next, 1u, __ATOMIC_RELAXED);
    if (i >= launch.blocks) break;
    run_block(launch, launch.order[i], fibers, stacks);
  }
  std::free(stacks);
  std::free(fibers);
  release(&launch.end);
  return nullptr;
}

}  // namespace

void run(unsigned blocks, unsigned threads, std::size_t shared_bytes, std::uint64_t seed, int workers,
         void (*kernel)(void*), void* arguments) {
  if (threads == 0 || threads > kMaxThreads) {
    std::fprintf(stderr, "SIMT: %u threads in a block; valid: 1 to %u\n", threads, kMaxThreads);
    std::abort();
  }
  Launch launch{blocks, threads, shared_bytes, seed, kernel, arguments, nullptr, 0, 0, 0};
  launch.order = static_cast<unsigned*>(std::malloc(sizeof(unsigned) * (blocks + 1)));
  Random random{seed * 2654435761u + 1};
  for (unsigned i = 0; i < blocks; ++i) {  // an inside-out shuffle
    const unsigned j = random.below(i + 1);
    launch.order[i] = launch.order[j];
    launch.order[j] = i;
  }
  release(&launch.begin);
  if (workers <= 1) {
    work(&launch);
  } else {
    pthread_t* helpers = static_cast<pthread_t*>(std::malloc(sizeof(pthread_t) * static_cast<unsigned>(workers)));
    for (int w = 0; w < workers; ++w) {
      if (pthread_create(&helpers[w], nullptr, work, &launch) != 0) std::abort();
    }
    for (int w = 0; w < workers; ++w) pthread_join(helpers[w], nullptr);
    std::free(helpers);
  }
  acquire(&launch.end);
  std::free(launch.order);
}

unsigned index(Index which) {
  switch (which) {
    case Index::kThread: return block->current->thread;
    case Index::kBlock: return block->number;
    case Index::kBlockSize: return block->launch->threads;
    default: return block->launch->blocks;
  }
}

void* dynamic_shared_memory() { return block->shared; }

void maybe_yield() {
  if (block->random.below(4) == 0) to_scheduler();
}

void spin() {
  to_scheduler();
  sched_yield();
}

void barrier() {
  release(&block->order_of_barrier);
  block->current->state = kAtBarrier;
  to_scheduler();
  acquire(&block->order_of_barrier);
}

void meet_lanes(const char* name, unsigned mask, std::uint64_t value) {
  Fiber* self = block->current;
  if (!(mask >> (self->thread & 31) & 1u)) fail("a thread is not in the mask that it names", mask);
  char* order = &block->order_of_warp[self->thread / 32];
  release(order);
  self->mask = mask;
  self->operation = name;
  self->value = value;
  self->state = kAtWarpOperation;
  to_scheduler();
  acquire(order);
}

std::uint64_t lane_value(int lane) { return block->current->received[lane]; }

void fail(const char* message, unsigned mask) {
  std::fprintf(stderr, "SIMT: %s (block %u, thread %u, mask %08x)\n", message, block->number, block->current->thread,
               mask);
  std::abort();
}

}  // namespace simt
