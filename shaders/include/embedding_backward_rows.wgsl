// embedding_backward.wgsl with a workgroup for each row of the batch: the first row of its token sums all of them.
$$ set chunk = workgroup * per_lane
var<workgroup> earlier: atomic<u32>;  // whether an earlier row has the same token
var<workgroup> hits: array<atomic<u32>, {{ chunk // 32 }}>;  // a bit a row of the chunk
var<workgroup> n_hits: atomic<u32>;
var<workgroup> found: array<u32, {{ chunk }}>;  // the rows that hit, ascending

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let row = min(group, rows - 1u);
    let token = tokens[row];
    var same = false;
    for (var j = lane; j < row; j += {{ workgroup }}u) {
        same = same || tokens[j] == token;
    }
    // Explicitly: drivers do not reliably start a workgroup with zeroed memory.
    if (lane == 0u) {
        atomicStore(&earlier, 0u);
    }
    workgroupBarrier();
    if (same) {
        atomicStore(&earlier, 1u);
    }
    workgroupBarrier();
    let own = token >= {{ first_row }}u && token - {{ first_row }}u < piece_rows && group < rows;
    let owner = own && atomicLoad(&earlier) == 0u;
    let stop = select(0u, rows, owner);
$$ for s in range(slots)
    var sum{{ s }} = pack(0.0);
$$ endfor
    for (var first = row; first < rows; first += {{ chunk }}u) {
        for (var w = lane; w < {{ chunk // 32 }}u; w += {{ workgroup }}u) {
            atomicStore(&hits[w], 0u);
        }
        if (lane == 0u) {
            atomicStore(&n_hits, 0u);
        }
        workgroupBarrier();
        for (var j = lane; j < {{ chunk }}u && first + j < stop; j += {{ workgroup }}u) {
            if (tokens[first + j] == token) {
                // Only bits and a count: the same whatever the order.
                atomicOr(&hits[j / 32u], 1u << (j % 32u));
                atomicAdd(&n_hits, 1u);
            }
        }
        workgroupBarrier();
        for (var w = lane; w < {{ chunk // 32 }}u; w += {{ workgroup }}u) {
            var bits = atomicLoad(&hits[w]);
            if (bits != 0u) {
                var at = 0u;
                for (var before = 0u; before < w; before++) {
                    at += countOneBits(atomicLoad(&hits[before]));
                }
                while (bits != 0u) {
                    found[at] = first + w * 32u + firstTrailingBit(bits);
                    at++;
                    bits &= bits - 1u;
                }
            }
        }
        workgroupBarrier();
        let n = atomicLoad(&n_hits);
        // {{ unroll }} at a time, so that their loads overlap; each chunk has a sum of its own, which
        // keeps the sum of a frequent token exact to float32.
$$ for s in range(slots)
        if (lane + {{ s * workgroup }}u < {{ columns }}u) {
            let c = lane + {{ s * workgroup }}u;
            var chunk_sum = pack(0.0);
            for (var k = 0u; k < n; k += {{ unroll }}u) {
$$ for j in range(unroll)
                var value{{ j }} = pack(0.0);
                if (k + {{ j }}u < n) {
                    value{{ j }} = dout[found[k + {{ j }}u] * {{ columns }}u + c];
                }
$$ endfor
                chunk_sum += (value0{$ for j in range(1, unroll // 2) $} + value{{ j }}{$ endfor $}) + (value{{ unroll // 2 }}{$ for j in range(unroll // 2 + 1, unroll) $} + value{{ j }}{$ endfor $});
            }
            sum{{ s }} += chunk_sum;
        }
$$ endfor
        workgroupBarrier();  // before the next chunk overwrites what was found
    }
    if (owner) {
$$ for s in range(slots)
        if (lane + {{ s * workgroup }}u < {{ columns }}u) {
            dweight[(token - {{ first_row }}u) * {{ columns }}u + lane + {{ s * workgroup }}u] += sum{{ s }};
        }
$$ endfor
    }
}
