"""Suffix decoding in plain Python: a count for every path, and the order of equal counts."""

import numpy as np


class Tree:
    """Counts each path of at most `depth` tokens of some sequences."""

    def __init__(self, depth):
        self.depth = depth
        self.sequences = {}
        self.count = {}
        self.children = {(): []}

    def append(self, sequence, token):
        tokens = self.sequences.setdefault(sequence, [])
        tokens.append(token)
        for size in range(min(len(tokens), self.depth), 0, -1):
            path = tuple(tokens[-size:])
            if path in self.count:
                self._raise(path)
            else:
                self.count[path] = 1
                self.children[path] = []
                self.children[path[:-1]].append(token)

    def remove(self, sequence):
        tokens = self.sequences.pop(sequence, [])
        for start in range(len(tokens)):
            for end in range(start + 1, min(start + self.depth, len(tokens)) + 1):
                path = tuple(tokens[start:end])
                if self.count[path] == 1:
                    self.children[path[:-1]].remove(path[-1])
                    for longer in [p for p in self.count if p[: len(path)] == path]:
                        del self.count[longer], self.children[longer]
                    break
                self._lower(path)

    def _raise(self, path):
        siblings, count = self._siblings(path)
        at = siblings.index(path[-1])
        before = count[at - 1] if at else None
        if before in (count[at], count[at] + 1):
            siblings.insert(count.index(before), siblings.pop(at))
        self.count[path] += 1

    def _lower(self, path):
        siblings, count = self._siblings(path)
        at = siblings.index(path[-1])
        if at + 1 < len(siblings) and count[at + 1] == count[at]:
            last = len(count) - 1 - count[::-1].index(count[at])
            siblings.insert(last, siblings.pop(at))
        self.count[path] -= 1

    def _siblings(self, path):
        siblings = self.children[path[:-1]]
        return siblings, [self.count[(*path[:-1], token)] for token in siblings]

    def speculate(self, context, most, factor, offset, least):
        """Returns (tokens, probs, score, match_len)."""
        best = [], [], np.float32(0), 0
        for size in range(1, len(context)):
            path = tuple(context[-size:])
            if path not in self.count:
                break
            wanted = np.float32(size) * np.float32(factor) + np.float32(offset)
            limit = max(0, min(most, int(float(wanted) + 1e-6)))
            tokens, probs, score = self._follow(path, limit, np.float32(least))
            if score >= best[2]:
                best = tokens, probs, score, size
        return best

    def _follow(self, path, limit, least):
        tokens, probs, score, prob = [], [], np.float32(0), np.float32(1)
        while len(tokens) < limit and prob >= least and self.children[path]:
            longer = (*path, self.children[path][0])
            prob *= np.float32(self.count[longer]) / np.float32(self.count[path])
            if prob < least:
                break
            tokens.append(longer[-1])
            probs.append(prob)
            score += prob
            path = longer
        return tokens, probs, score


class Cache:
    """A tree a request, and one over the responses: `SuffixDecodingCache` without its speed."""

    def __init__(self, depth, max_cached_requests):
        self.depth = depth
        self.limit = max_cached_requests
        self.own = {}
        self.cached = []
        self.shared = Tree(depth)

    def start_request(self, req_id, prompt):
        self.own[req_id] = Tree(self.depth)
        for token in prompt:
            self.own[req_id].append(0, token)
        if self.limit != 0:
            if req_id in self.cached:
                self.evict_cached_response(req_id)
            self.cached.append(req_id)
            while 0 <= self.limit < len(self.cached):
                self.evict_cached_response(self.cached[0])

    def add_active_response(self, req_id, tokens):
        for token in tokens:
            self.own[req_id].append(0, token)
            if req_id in self.cached:
                self.shared.append(req_id, token)

    def stop_request(self, req_id):
        del self.own[req_id]

    def evict_cached_response(self, req_id):
        self.cached.remove(req_id)
        self.shared.remove(req_id)

    def speculate(self, req_id, context, most, factor, offset, least):
        context = context[-self.depth :]
        own = self.own[req_id].speculate(context, most, factor, offset, least)
        shared = self.shared.speculate(context, most, factor, offset, least)
        return own if own[2] >= shared[2] else shared
