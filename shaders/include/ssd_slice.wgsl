// A lane's head of a chunk, i of all of them, and its slice of the chunk's steps.
// Neighbouring lanes hold neighbouring heads of all chunks, then comes the next slice of their steps.
    let own = group * {{ workgroup // slices }}u + lane % {{ workgroup // slices }}u;
    let slice = lane / {{ workgroup // slices }}u;
    let i = min(own, {{ batch * chunks * n_heads - 1 }}u);
    let head = i % n_heads;
