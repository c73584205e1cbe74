// Puts the sums of matmul.wgsl aside, weighted, where a fold of k ends: s += fold_weight c, c = 0.
$$ if per_fold is defined
        if ((k + {{ tile_k }}u) % {{ per_fold }}u == 0u) {
            let fold = k / {{ per_fold }}u;
$$ for i in range(thread_m)
$$ for g in range(gn)
            s{{ i }}_{{ g }} += fold_weight({{ row_at(i) }}, {{ col_at(g) }}, fold) * c{{ i }}_{{ g }};
            c{{ i }}_{{ g }} = vec4f();
$$ endfor
$$ endfor
        }
$$ endif
