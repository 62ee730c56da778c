#include "fork.h"

#include <pthread.h>
#include <semaphore.h>

#include <cerrno>
#include <new>

namespace {

// A thread that runs functions for the forked thread until the process ends. A child's child starts another.
struct Server {
  sem_t go, done;
  void (*f)(void *);
  void *data;

  static void *serve(void *server) {
    auto *s = static_cast<Server *>(server);
    for (;;) {
      wait(&s->go);
      s->f(s->data);
      sem_post(&s->done);
    }
  }
  static void wait(sem_t *semaphore) {
    while (sem_wait(semaphore) && errno == EINTR) {
    }
  }
  static Server *start() {
    auto *s = new (std::nothrow) Server;
    if (!s) return nullptr;
    sem_init(&s->go, 0, 0), sem_init(&s->done, 0, 0);
    pthread_t thread;
    if (pthread_create(&thread, nullptr, serve, s)) return delete s, nullptr;
    pthread_detach(thread);
    return s;
  }
};

thread_local bool forked = false;
Server *server = nullptr;  // used by the forked thread only

[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { forked = true, server = nullptr; });  // the parent's server is not freed

}  // namespace

bool aot::in_forked_thread() noexcept { return forked; }

bool aot::run_on_new_thread(void (*f)(void *), void *data) noexcept {
  if (!server) server = Server::start();
  if (!server) return false;
  server->f = f, server->data = data;
  sem_post(&server->go);
  Server::wait(&server->done);
  return true;
}
