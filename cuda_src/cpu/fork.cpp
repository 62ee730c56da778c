#include "fork.h"

#include <pthread.h>
#include <semaphore.h>

#include <cerrno>
#include <new>

namespace {

// Serves the thread that came through the fork, for as long as the process lives. A child of its own has another.
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

thread_local bool through_fork = false;
Server *server = nullptr;  // only the thread that came through the fork asks for it

[[maybe_unused]] const int watched =
    pthread_atfork(nullptr, nullptr, [] { through_fork = true, server = nullptr; });  // a parent's is not freed

}  // namespace

bool aot::came_through_fork() noexcept { return through_fork; }

bool aot::run_on_new_thread(void (*f)(void *), void *data) noexcept {
  if (!server) server = Server::start();
  if (!server) return false;
  server->f = f, server->data = data;
  sem_post(&server->go);
  Server::wait(&server->done);
  return true;
}
