// The ranks' memory. Every rank sees it at addresses of its own, as if ranks were processes: an address of one rank
// means nothing to another rank. In a run with guards, a rank's addresses are accessible only while that rank runs.
//
// ThreadSanitizer identifies memory by its address, so with ThreadSanitizer all ranks share one set of addresses.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#ifdef __SANITIZE_THREAD__
constexpr bool APART = false;
#else
constexpr bool APART = true;
#endif

class Memory {
public:
    static constexpr std::uint64_t REGION_BYTES = 256 << 10;
    static constexpr std::uint64_t CONTROL_BYTES = 2 << 20;
    // Whether the addresses of ranks that do not run are protected. Each change of the running rank then takes system
    // calls for each rank, so such a run lets ranks change seldom.
    inline static bool guarded = APART;

    Memory(unsigned owner, unsigned ranks) : owner(owner) {
        const int file = memfd_create("rank", 0);
        if (file < 0 || ftruncate(file, BYTES) != 0) end("memfd_create");
        for (unsigned viewer = 0; viewer < (APART ? ranks : 1); viewer++) {
            void* view = mmap(nullptr, BYTES, SHOWN, MAP_SHARED, file, 0);
            if (view == MAP_FAILED) end("mmap");
            views.push_back(static_cast<unsigned char*>(view));
        }
        close(file);
    }

    // The address at which this memory begins for a rank. The control block lies there.
    unsigned char* seen_by(unsigned rank) const { return views[APART ? rank : 0]; }

    // The owner's address of a part of this memory. The same name gives the same part.
    unsigned char* at(const std::string& name) {
        const auto [found, added] = offsets.try_emplace(name, CONTROL_BYTES + offsets.size() * REGION_BYTES);
        if (added && found->second + REGION_BYTES > BYTES) end("more parts than there is memory");
        return seen_by(owner) + found->second;
    }

    // From now on `rank` runs, and no other. A proxy, which has a higher number, sees nothing.
    void show_to(unsigned rank) {
        if (!guarded || rank == shown) return;
        if (all_shown)
            for (unsigned char* view : views) protect(view, PROT_NONE);
        else if (shown < views.size())
            protect(views[shown], PROT_NONE);
        if (rank < views.size()) protect(views[rank], SHOWN);
        shown = rank;
        all_shown = false;
    }

private:
    static constexpr int SHOWN = PROT_READ | PROT_WRITE;
    static constexpr std::uint64_t BYTES = CONTROL_BYTES + 48 * REGION_BYTES;
    unsigned owner;
    unsigned shown = ~0u;
    bool all_shown = true;
    std::vector<unsigned char*> views;
    std::map<std::string, std::uint64_t> offsets;

    static void protect(unsigned char* view, int how) {
        if (mprotect(view, BYTES, how) != 0) end("mprotect");
    }

    [[noreturn]] static void end(const char* what) {
        std::perror(what);
        std::exit(2);
    }
};
