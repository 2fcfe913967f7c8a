"""
What the client uploads by the Xet protocol (huggingface.co/docs/xet), put together again: xorbs of compressed chunks,
and shards that say which chunks make up a file.
"""

import struct


RECORD = 48  # bytes of every entry of a shard
WITH_VERIFICATION, WITH_SHA256 = 1 << 31, 1 << 30


def hash_text(content):
    """32 bytes as the protocol writes hashes: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", content))


def chunks_of(xorb):
    """The chunks of a serialised xorb, uncompressed."""
    found, at = [], 0
    while at < len(xorb) and xorb[at : at + 7] != b"XETBLOB":  # which begins the footer
        stored, kind, size = int.from_bytes(xorb[at + 1 : at + 4], "little"), xorb[at + 4], xorb[at + 5 : at + 8]
        content, at = xorb[at + 8 : at + 8 + stored], at + 8 + stored
        chunk = content if kind == 0 else lz4(content)
        chunk = ungrouped(chunk) if kind == 2 else chunk
        if len(chunk) != int.from_bytes(size, "little"):
            raise ValueError("a chunk has not the size that its header names")
        found.append(chunk)
    return found


def files_of(shard, xorbs):
    """The files that a shard describes, each with its SHA-256, from the chunks of xorbs by their hash."""
    at = RECORD  # after the header
    while shard[at : at + 32] != b"\xff" * 32:
        flags, entries = struct.unpack_from("<II", shard, at + 32)
        content = b""
        for _ in range(entries):
            at += RECORD
            _, _, first, last = struct.unpack_from("<4I", shard, at + 32)
            content += b"".join(xorbs[hash_text(shard[at : at + 32])][first:last])
        at += RECORD * entries if flags & WITH_VERIFICATION else 0
        at += RECORD
        if flags & WITH_SHA256:
            yield hash_text(shard[at : at + 32]), content
            at += RECORD


def ungrouped(content):
    """Bytes that were sorted by their place within four."""
    result, at = bytearray(len(content)), 0
    for place in range(4):
        size = len(result[place::4])
        result[place::4] = content[at : at + size]
        at += size
    return bytes(result)


def lz4(frame):
    """The content of an LZ4 frame."""
    flags, at = frame[4], 7 + (8 if frame[4] & 8 else 0) + (4 if frame[4] & 1 else 0)
    result = bytearray()
    while size := int.from_bytes(frame[at : at + 4], "little"):
        at += 4
        length = size & 0x7FFFFFFF
        if size >> 31:  # stored as it is
            result += frame[at : at + length]
        else:
            lz4_block(frame[at : at + length], result)
        at += length + (4 if flags & 16 else 0)
    return bytes(result)


def lz4_block(block, result):
    at = 0

    def length(nibble):
        nonlocal at
        total = nibble
        while nibble == 15:
            total += block[at]
            at += 1
            if block[at - 1] != 255:
                break
        return total

    while at < len(block):
        token = block[at]
        at += 1
        literals = length(token >> 4)
        result += block[at : at + literals]
        at += literals
        if at < len(block):  # the last sequence has literals alone
            start = len(result) - int.from_bytes(block[at : at + 2], "little")
            at += 2
            for index in range(start, start + length(token & 15) + 4):  # may overlap with what it writes
                result.append(result[index])
