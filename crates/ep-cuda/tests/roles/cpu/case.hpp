// Reads a case that the test has written: what the ranks have, what they call, and the expected results.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

using Bytes = std::vector<unsigned char>;

// Numbers, inputs and expected outputs, by name.
struct Record {
    std::map<std::string, std::uint64_t> numbers;
    std::map<std::string, Bytes> inputs;
    std::map<std::string, Bytes> outputs;

    std::uint64_t number(const char* name) const {
        const auto found = numbers.find(name);
        if (found == numbers.end()) {
            std::fprintf(stderr, "the case has no number \"%s\"\n", name);
            std::exit(2);
        }
        return found->second;
    }
};

// An operator that all ranks call, each with its own arguments. A rank whose number "takes part" is 0 does not call it.
struct Operator {
    std::string kernel;
    std::vector<Record> ranks;
};

struct Case {
    Record world;
    std::vector<Operator> operators;
};

// The file consists of 64-bit words, and byte arrays after a word with their length.
class Reader {
public:
    explicit Reader(const char* path) {
        std::FILE* file = std::fopen(path, "rb");
        if (file == nullptr) {
            std::perror(path);
            std::exit(2);
        }
        unsigned char buffer[1 << 16];
        while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, file))
            all.insert(all.end(), buffer, buffer + count);
        std::fclose(file);
    }

    Case read() {
        Case found;
        found.world = record();
        found.operators.resize(word());
        for (Operator& each : found.operators) {
            each.kernel = text();
            for (std::uint64_t rank = 0; rank < found.world.number("ranks"); rank++) each.ranks.push_back(record());
        }
        return found;
    }

private:
    Bytes all;
    std::size_t at = 0;

    const unsigned char* take(std::size_t count) {
        if (all.size() - at < count) {
            std::fputs("the case ends early\n", stderr);
            std::exit(2);
        }
        at += count;
        return all.data() + at - count;
    }

    std::uint64_t word() {
        std::uint64_t value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }

    Bytes bytes() {
        const std::uint64_t count = word();
        const unsigned char* first = take(count);
        return Bytes(first, first + count);
    }

    std::string text() {
        const Bytes found = bytes();
        return std::string(found.begin(), found.end());
    }

    std::map<std::string, Bytes> named_bytes() {
        std::map<std::string, Bytes> found;
        for (std::uint64_t left = word(); left != 0; left--) {
            std::string name = text();
            found[std::move(name)] = bytes();
        }
        return found;
    }

    Record record() {
        Record found;
        for (std::uint64_t left = word(); left != 0; left--) {
            std::string name = text();
            found.numbers[std::move(name)] = word();
        }
        found.inputs = named_bytes();
        found.outputs = named_bytes();
        return found;
    }
};
