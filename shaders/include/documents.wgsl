// Where documents begin and end. A position sees the keys of its own document up to itself. Keys are counted from the start of the
// cache, where there is one: position[b] holds where the document of the last cached key begins, and how many keys are cached.
fn cached_keys(b: u32) -> u32 {
    return {{ "position[2u * b + 1u]" if "position" in bound else "0u" }};
}
$$ if "documents" in bound
// The first timestep from `low` on with the document of t, by bisection: ids do not decrease.
fn document_start(b: u32, t: u32, low: u32) -> u32 {
    let id = documents[b * seqlen + t];
    var first = low;
    var last = t;
    while (first < last && documents[b * seqlen + first] != id) {
        let middle = (first + last) / 2u;
        if (documents[b * seqlen + middle] == id) { last = middle; } else { first = middle + 1u; }
    }
    return first;
}
// The first timestep after the document of t.
fn document_end(b: u32, t: u32) -> u32 {
    let id = documents[b * seqlen + t];
    var first = t;
    var last = seqlen - 1u;
    while (first < last && documents[b * seqlen + last] != id) {
        let middle = (first + last + 1u) / 2u;
        if (documents[b * seqlen + middle] == id) { first = middle; } else { last = middle - 1u; }
    }
    return last + 1u;
}
$$ endif
// The first key that timestep t sees. The first document of a call continues the cached one.
fn first_key(b: u32, t: u32) -> u32 {
$$ if "documents" in bound
    let start = document_start(b, t, 0u);
    if (start > 0u) { return cached_keys(b) + start; }
$$ endif
    return {{ "position[2u * b]" if "position" in bound else "0u" }};
}
