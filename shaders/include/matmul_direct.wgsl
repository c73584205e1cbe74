// matmul.wgsl straight from storage, for CPUs, where loads cost by the element and workgroup memory is no nearer. A thread owns
// thread_m rows; the columns are common to all. {{ lanes }} threads, a subgroup, share the loads of b and broadcast them.
// Where tile_k is 8, operands come by eights.
$$ set loads_b = thread_n // lanes
{$ macro loaded_b(line, k) $}{{ "weigh_b(" ~ line ~ ", " ~ k ~ ") * " if b.get("weighed") }}{{ mine }}load_b({{ line }}, {{ k }}){$ endmacro $}
{$ macro row_at(i) $}{{ "row0 + " ~ i ~ "u" }}{$ endmacro $}
{$ macro col_at(g) $}{{ "col0 + " ~ 4 * g ~ "u" }}{$ endmacro $}

$$ if joined is defined
fn {{ mine }}product(group: u32, thread: u32) {
$$ else
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) thread: u32) {
    let group = group_index(wid, groups);
$$ endif
$$ if products is defined
    let product = product_index(group);
    let tile = product_tile(group);
    begin(product, tile.x * {{ tile_m }}u);
$$ else
    let tile = {{ mine }}tile_index(group);
$$ endif
    let row0 = tile.x * {{ tile_m }}u + thread * {{ thread_m }}u;
    let col0 = tile.y * {{ tile_n }}u;
$$ for f in range(loads_b)
    let v{{ f }} = {{ f * lanes }}u + thread % {{ lanes }}u;
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(gn)
    var c{{ i }}_{{ g }} = vec4f();
$$ if per_fold is defined
    var s{{ i }}_{{ g }} = vec4f();
$$ endif
$$ endfor
$$ endfor
$$ if row_sums
$$ for i in range(thread_m)
    var row_sum{{ i }} = 0.0;
$$ endfor
$$ endif
    for (var k = {{ from_k }}; k < {{ to_k }}; k += {{ tile_k }}u) {
$$ if a.blocks is defined
$$ for q in range(gm)
        {{ "let factors" ~ q ~ " = weigh_a_block(row0 + " ~ 4 * q ~ "u, k);" if a.get("weighed") }}
        let block{{ q }} = load_a_block(row0 + {{ 4 * q }}u, k);
$$ endfor
$$ elif eights and a.along == "k"
$$ for i in range(thread_m)
        let eight_a{{ i }} = {{ mine }}eight_a(row0 + {{ i }}u, k);
$$ endfor
$$ elif eights
$$ for q in range(0, gm, 2)
$$ for j in range(tile_k)
        let eight_a{{ q // 2 * tile_k + j }} = {{ mine }}eight_a(row0 + {{ 4 * q }}u, k + {{ j }}u);
$$ endfor
$$ endfor
$$ endif
$$ if eights
$$ for f in range(loads_b)
$$ if b.along == "k"
        let eight_b{{ f }} = {{ mine }}eight_b(col0 + v{{ f }}, k);
$$ else
        let eight_b{{ f }} = {{ mine }}eight_b(col0 + v{{ f }} % {{ gn // 2 }}u * 8u, k + v{{ f }} / {{ gn // 2 }}u);
$$ endif
$$ endfor
$$ endif
$$ for h in range(tile_k // 4)
        {
$$ for i in range(thread_m)
$$ if a.blocks is defined
        let a{{ i }} = {{ "factors%d[%d] * " % (i // 4, i % 4) if a.get("weighed") }}block{{ i // 4 }}[{{ i % 4 }}];
$$ elif eights and a.along == "k"
        let a{{ i }} = eight_a{{ i }}[{{ h }}];
$$ elif eights
        let a{{ i }} = eight_a{{ i % gm // 2 * tile_k + 4 * h + i // gm }}[{{ i % gm % 2 }}];
$$ elif a.along == "k"
        let a{{ i }} = {{ mine }}load_a(row0 + {{ i }}u, k);
$$ else
        let a{{ i }} = {{ mine }}load_a(row0 + {{ i % gm * 4 }}u, k + {{ i // gm }}u);
$$ endif
$$ endfor
$$ for f in range(0 if eights else loads_b)
$$ if b.along == "k"
        let shared{{ f }} = {{ loaded_b("col0 + v%d" % f, "k") }};
$$ else
        let shared{{ f }} = {{ loaded_b("col0 + v%d %% %du * 4u" % (f, gn), "k + v%d / %du" % (f, gn)) }};
$$ endif
$$ endfor
$$ for g in range(gn)
$$ for j in range(4)
$$ set v = 4 * g + j if b.along == "k" else j * gn + g
$$ if eights
$$ set own = v if b.along == "k" else (4 * h + j) * (gn // 2) + g // 2
        let b{{ v }} = subgroupBroadcast(eight_b{{ own // lanes }}[{{ h if b.along == "k" else g % 2 }}], {{ own % lanes }}u);
$$ else
        let b{{ v }} = {{ "subgroupBroadcast(shared" ~ v // lanes ~ ", " ~ v % lanes ~ "u)" if lanes > 1 else "shared" ~ v }};
$$ endif
$$ endfor
$$ for i in range(thread_m)
$$ if a.along == "k" and b.along == "k"
        c{{ i }}_{{ g }} += vec4f(dot(a{{ i }}, b{{ 4 * g }}), dot(a{{ i }}, b{{ 4 * g + 1 }}), dot(a{{ i }}, b{{ 4 * g + 2 }}), dot(a{{ i }}, b{{ 4 * g + 3 }}));
$$ elif a.along == "k"
        c{{ i }}_{{ g }} += a{{ i }}.x * b{{ g }} + a{{ i }}.y * b{{ gn + g }} + a{{ i }}.z * b{{ 2 * gn + g }} + a{{ i }}.w * b{{ 3 * gn + g }};
$$ else
$$ set q, e = i // 4, "." ~ "xyzw"[i % 4]
        c{{ i }}_{{ g }} += a{{ q }}{{ e }} * b{{ g }} + a{{ gm + q }}{{ e }} * b{{ gn + g }} + a{{ 2 * gm + q }}{{ e }} * b{{ 2 * gn + g }} + a{{ 3 * gm + q }}{{ e }} * b{{ 3 * gn + g }};
$$ endif
$$ endfor
$$ endfor
$$ if row_sums
        if (tile.y == 0u) {
$$ for i in range(thread_m)
$$ set q, e = i // 4, "." ~ "xyzw"[i % 4]
            row_sum{{ i }} += a{{ q }}{{ e }} + a{{ gm + q }}{{ e }} + a{{ 2 * gm + q }}{{ e }} + a{{ 3 * gm + q }}{{ e }};
$$ endfor
        }
$$ endif
        }
$$ endfor
{$ include "include/matmul_fold.wgsl" $}
    }
{$ include "include/matmul_finish.wgsl" $}
$$ if each_row
    if (tile.y == 0u) {
$$ for i in range(thread_m)
        finish_row(row0 + {{ i }}u);
$$ endfor
    }
$$ endif
$$ for i in range(0, thread_m if row_terms else 0, 4)
    finish_rows({{ row_at(i) }}, col0, transpose(mat4x3f({$ for j in range(4) $}terms{{ i + j }}{{ ", " if j < 3 }}{$ endfor $})));
$$ endfor
$$ if row_sums
    if (tile.y == 0u) {
$$ for i in range(thread_m)
        {{ mine }}finish_row_sum({{ part }}row0 + {{ i }}u, row_sum{{ i }});
$$ endfor
    }
$$ endif
}
