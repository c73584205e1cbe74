// Hands a thread's sums in matmul.wgsl to finish(), by four columns or one at a time.
$$ set places = []
$$ for i in range(thread_m)
$$ for g in range(gn)
$$ for e in ([""] if out_type == "vec4f" else [".x", ".y", ".z", ".w"])
$$ set _ = places.append((i, row_at(i), col_at(g) ~ (" + %du" % loop.index0 if e else ""), "%s%d_%d%s" % (sums, i, g, e)))
$$ endfor
$$ endfor
$$ endfor
$$ for i in range(thread_m if row_terms else 0)
    var terms{{ i }} = vec3f();
$$ endfor
$$ if row_terms
    var found = find({{ places[0][1] }}, {{ places[0][2] }});
$$ endif
$$ for i, row, col, sum in places
$$ if row_terms
    let found{{ loop.index0 }} = found;
$$ if not loop.last
    found = find({{ places[loop.index][1] }}, {{ places[loop.index][2] }});
$$ endif
    terms{{ i }} += finish({{ row }}, {{ col }}, {{ sum }}, found{{ loop.index0 }});
$$ else
    {{ mine }}finish({{ part }}{{ row }}, {{ col }}, {{ sum }});
$$ endif
$$ endfor
